"""Classifiers that guide: made from a small causal model, saved, loaded.

A folder is what transformers saves of the body and the tokenizer, ``value_head.safetensors``, and ``classifier.json``
(``form``), which is written last: a folder without it is no classifier.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.atomic import atomic_folder, atomic_write
from gpuherd.errors import BadModel, UsageError, naming_extras
from gpuherd.lm.guidance.guide import FILE, HEAD_FILE, ClassifierForm, Head, Kind, read_form, tokens_digest
from gpuherd.models.load.identity import tokenizer_in
from gpuherd.models.load.pretrained import no_progress_bars

if TYPE_CHECKING:
    import torch

    from gpuherd.lm.guidance.value_model import ReadingMaker, ValueModel

_EXTRAS = {"torch": "load", "transformers": "load", "safetensors": "load", "huggingface_hub": "load"}


@dataclass(eq=False)
class Classifier:
    """A classifier in memory.

    Attributes:
        module: what is trained and asked; float32 values come out of it whatever its dtype.
        tokenizer: transformers'.
        form: what its values mean.
        name: of the folder or model, for messages.
    """

    module: ValueModel
    tokenizer: Any
    form: ClassifierForm
    name: str

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.module.head.weight.device

    @cached_property
    def most_positions(self) -> int | None:
        """The most tokens of a row; None where the body does not say."""
        from gpuherd.lm.forward import CausalModel

        return CausalModel(self.module.body, str(self.device)).most_positions

    @cached_property
    def readings(self) -> ReadingMaker:
        """Makes readings of rows that grow; the body is tried on a few tokens first."""
        from gpuherd.lm.guidance.value_model import ReadingMaker

        return ReadingMaker(self.module, self.name)

    def values(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The value of every token behind its prefix: see ``ValueModel.forward``."""
        values: torch.Tensor = self.module(ids, mask, positions)
        return values

    def save(
        self,
        folder: Path | str,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        loss: str | None = None,
        trained: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the folder, complete or not at all; one that was there is replaced.

        Args:
            state: the weights, under the names of ``module.state_dict()``, where they don't lie in the module (sharded
                training gathers them).
            loss, trained: by what it was trained, for ``classifier.json``.
        """
        from safetensors.torch import save_file

        weights = dict(self.module.state_dict() if state is None else state)
        head = {name.removeprefix("head."): each for name, each in weights.items() if name.startswith("head.")}
        body = {name.removeprefix("body."): each for name, each in weights.items() if name.startswith("body.")}
        form = replace(
            self.form,
            loss=self.form.loss if loss is None else loss,
            trained=self.form.trained if trained is None else dict(trained),
        )
        with atomic_folder(Path(folder)) as aside, _quietly():
            self.module.body.save_pretrained(aside, state_dict=body)  # type: ignore[operator]
            self.tokenizer.save_pretrained(aside)
            save_file({name: each.detach().cpu().contiguous() for name, each in head.items()}, aside / HEAD_FILE)
            text = json.dumps(form.to_dict(), indent=2, sort_keys=True)
            atomic_write(aside / FILE, text.encode("utf-8") + b"\n")


def new_classifier(
    model: str | Path,
    kind: Kind = Kind.V,
    head: Head = Head.BERNOULLI,
    atoms: Sequence[float] = (),
    *,
    device: str = "cpu",
    dtype: str | None = None,
    attention: str | None = None,
) -> Classifier:
    """A classifier that knows nothing yet: the body of a causal model, and a head that is 0.

    Args:
        model: a folder, or an id of the Hub.
        kind, head, atoms: see ``form``; the atoms are the rewards, in order.
        device: where it goes.
        dtype: ``float32``, ``bfloat16``, ``float16``; the checkpoint's own by default.
        attention: ``sdpa`` or ``eager``; what the model can by default.

    Raises MissingModel, BadModel: it is not there, is damaged, brings its own code, or reads in both directions.
    """
    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.names import parse_model

    with naming_extras(_EXTRAS, "a classifier takes"):
        import torch  # noqa: F401
        import transformers  # noqa: F401
    from gpuherd.lm.guidance.value_model import ValueModel, width_of

    folder = locate(parse_model(str(model)), for_loading=True)
    tokenizer = tokenizer_in(folder)
    body = _body(folder, device, dtype, attention)
    form = ClassifierForm(
        Kind(kind), Head(head), tuple(map(float, atoms)), tokens_digest(tokenizer.get_vocab()), str(model)
    )
    module = ValueModel(body, form, width_of(body, str(model)))
    return Classifier(module.eval(), tokenizer, form, str(model))


def load_classifier(
    folder: Path | str, device: str = "cpu", dtype: str | None = None, attention: str | None = None
) -> Classifier:
    """A classifier that ``Classifier.save`` wrote, in evaluation mode.

    Args:
        folder: where it is.
        device: where it goes; it need not be the policy's.
        dtype: of its weights; as they were saved by default.
        attention: ``sdpa`` or ``eager``; what the model can by default.

    Raises MissingModel where there is none, BadModel where it is damaged.
    """
    folder = Path(folder)
    form = read_form(folder)
    with naming_extras(_EXTRAS, "a classifier takes"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    from gpuherd.lm.guidance.value_model import ValueModel, width_of

    tokenizer = tokenizer_in(folder)
    if tokens_digest(tokenizer.get_vocab()) != form.tokenizer_sha256:
        raise BadModel(f"{folder}: its tokenizer is not the one that it was trained with ({FILE})")
    body = _body(folder, device, dtype, attention)
    module = ValueModel(body, form, width_of(body, str(folder)))
    try:
        module.head.load_state_dict(load_file(folder / HEAD_FILE))
    except (OSError, SafetensorError, RuntimeError) as problem:
        raise BadModel(f"{folder / HEAD_FILE} does not fit the classifier: {problem}") from None
    return Classifier(module.eval(), tokenizer, form, str(folder))


def _body(folder: Path, device: str, dtype: str | None, attention: str | None) -> Any:
    """The model without its head for tokens, in evaluation mode."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise BadModel(f"{folder} has an encoder and a decoder; a classifier is made from a causal language model")
        with _quietly():
            body, loaded = AutoModel.from_pretrained(
                folder,
                config=config,
                dtype="auto" if dtype is None else _torch_dtype(dtype),
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, AttributeError) as problem:
        raise BadModel(f"{folder} can't be loaded as the body of a classifier: {problem}") from None
    if loaded["missing_keys"]:
        missing = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise BadModel(f"{folder} lacks weights: {missing}")
    return body.to(device).eval()


def _torch_dtype(word: str) -> torch.dtype:
    """``float32`` or ``fp32``, and so on. Raises UsageError."""
    import torch

    from gpuherd.models.memory.weights import Precision
    from gpuherd.models.place.request import parse_precision

    known = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
    named = parse_precision(word)
    if named not in known:
        raise UsageError(f"dtype {word!r}: a classifier is loaded as {', '.join(known)}")
    return known[named]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bars, and without its report of every weight that has no place: a body has none for the
    head of tokens, and that is meant."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_progress_bars():
            yield
    finally:
        logging.set_verbosity(verbosity)
