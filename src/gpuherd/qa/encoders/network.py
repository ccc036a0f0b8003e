"""An encoder in memory: texts as its inputs, and its forward pass over many inputs of different lengths.

Always in float32 and evaluation mode, without gradients: encoders are small, and a similarity is used as a number.
Torch is imported with the first network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, MissingModel, naming_extras
from gpuherd.lm.batching import halved, plan_batches
from gpuherd.models.names import shown
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from gpuherd.qa.encoders.model_files import EncoderFiles


@dataclass(frozen=True, slots=True)
class Input:
    """One input of an encoder: token ids with the special ones, and to which of two texts each belongs."""

    token_ids: tuple[int, ...]
    types: tuple[int, ...] | None = None


def inputs_of(
    tokenizer: Any, texts: Sequence[str], others: Sequence[str] | None, *, longest: int | None, cut: bool
) -> list[Input | None]:
    """The texts, or the pairs that they make with ``others``, each as one input.

    What has more than ``longest`` tokens is None, or, with ``cut``, loses tokens at the end of the longer text. A
    similarity of beginnings is not one of the texts, so that nothing is cut unless that is asked for.
    """
    if not texts:
        return []
    types = "token_type_ids" in tokenizer.model_input_names
    limits = {"truncation": "longest_first", "max_length": longest} if cut and longest is not None else {}
    coded = tokenizer(
        list(texts),
        None if others is None else list(others),
        return_attention_mask=False,
        return_token_type_ids=types,
        verbose=False,
        **limits,
    )
    found: list[Input | None] = []
    for number, token_ids in enumerate(coded["input_ids"]):
        fits = longest is None or len(token_ids) <= longest
        kinds = tuple(coded["token_type_ids"][number]) if types else None
        found.append(Input(tuple(token_ids), kinds) if fits else None)
    return found


def padding_id(tokenizer: Any, name: str) -> int:
    """The id that fills up shorter inputs. Raises BadModel where the tokenizer has none."""
    if tokenizer.pad_token_id is None:
        raise BadModel(f"the tokenizer of {name!r} has no padding token; an encoder is run on many texts at once")
    number: int = tokenizer.pad_token_id
    return number


# --- in memory --------------------------------------------------------------------------------------------------------

EXTRAS = {"torch": "qa", "transformers": "qa"}
# Of a batch, padding counted; a transformer encoder's activations are then well below 1 GB.
_MOST_TOKENS = 1 << 15


class Network:
    """A transformer with its tokenizer, on the first GPU that there is, else on the CPU.

    Args:
        files: where it lies.
        head: with its head for sequence classification.
        rows: the most inputs in one pass.

    Raises:
        MissingExtra: torch or transformers is not there.
        MissingModel: no tokenizer.
        BadModel: transformers can't load it, or the checkpoint lacks weights that would be made up at random.
    """

    def __init__(self, files: EncoderFiles, *, head: bool, rows: int = 64) -> None:
        with naming_extras(EXTRAS, "comparing texts with models takes"):
            import torch
            import transformers
        self.name = files.name
        self.rows = rows
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = _tokenizer(files)
        self.padding = padding_id(self.tokenizer, files.name)
        loader = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
        self.model = _model(loader, files, torch.float32).to(self.device).eval()

    @property
    def tokenizer_limit(self) -> int | None:
        """The most tokens that the tokenizer's settings name."""
        limit = getattr(self.tokenizer, "model_max_length", None)
        return None if limit is None else int(limit)

    def run(self, inputs: Sequence[Input], read: Callable[[Any, torch.Tensor], torch.Tensor]) -> NDArray[np.float32]:
        """What ``read`` takes from the model's output for each input: float32, (n, d), in the order of the inputs.

        Args:
            inputs: one or more.
            read: of the model's output and the attention mask (b, t) makes the (b, d) that is wanted.
        """
        import numpy as np

        lengths = [len(each.token_ids) for each in inputs]
        waiting = list(plan_batches(lengths, rows=self.rows, most_tokens=_MOST_TOKENS))
        rows: list[NDArray[np.float32] | None] = [None] * len(inputs)
        while waiting:
            batch = waiting.pop(0)
            try:
                found = self._pass([inputs[number] for number in batch], read)
            except (RuntimeError, MemoryError) as problem:
                if len(batch) == 1 or not is_out_of_memory(problem):
                    raise
                found = None
            if found is None:
                # Outside the handler: a traceback keeps the tensors of the failed batch alive.
                _release()
                waiting[:0] = halved(batch)
                continue
            for number, row in zip(batch, found, strict=True):
                rows[number] = row
        return np.stack([row for row in rows if row is not None])

    def _pass(self, inputs: Sequence[Input], read: Callable[[Any, torch.Tensor], torch.Tensor]) -> NDArray[np.float32]:
        import torch

        longest = max(len(each.token_ids) for each in inputs)

        def filled(rows: Sequence[Sequence[int]], filling: int) -> torch.Tensor:
            # On the right: absolute positions count from the left.
            return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows], device=self.device)

        mask = filled([[1] * len(each.token_ids) for each in inputs], 0)
        given = {"input_ids": filled([each.token_ids for each in inputs], self.padding), "attention_mask": mask}
        types = [each.types for each in inputs if each.types is not None]
        if types:
            given["token_type_ids"] = filled(types, 0)
        with torch.inference_mode():
            wanted = read(self.model(**given), mask).float()
        if not bool(torch.isfinite(wanted).all()):
            raise BadModel(f"{shown(self.name)} gives numbers that are not finite; its weights are damaged")
        found: NDArray[np.float32] = wanted.cpu().numpy()
        return found


def _release() -> None:
    """Gives back the memory of a batch that did not fit."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _tokenizer(files: EncoderFiles) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as problem:
        raise MissingModel(f"{shown(files.name)} has no tokenizer that transformers can use: {problem}") from None


def _model(loader: Any, files: EncoderFiles, dtype: Any) -> Any:
    try:
        with _no_progress_bars():
            model, told = loader.from_pretrained(
                files.folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as problem:
        raise BadModel(f"transformers can't load {shown(files.name)}: {problem}") from None
    # A pooler's weights are often not there, and are used by a head alone, whose checkpoint then has them.
    bare = loader.__name__ == "AutoModel"
    missing = sorted(key for key in told["missing_keys"] if not (bare and key.startswith("pooler.")))
    if missing or told["mismatched_keys"]:
        first = (missing or [str(sorted(told["mismatched_keys"])[0])])[0]
        raise BadModel(
            f"{shown(files.name)} lacks weights that it would need for this ({len(missing)}, such as {first}): it was "
            "not trained for it"
        )
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading draws none within: logs of jobs are read as lines."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()
