"""Encoders in memory: the forward pass over inputs of different lengths, similarity of two texts, entailment (NLI).

Always in float32 and evaluation mode, without gradients: encoders are small, and a similarity is used as a number.
Torch is imported with the first network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpuherd.errors import BadModel, naming_extras
from gpuherd.lm.forward import halving, plan_batches
from gpuherd.models.load.pretrained import no_progress_bars
from gpuherd.models.names import quoted
from gpuherd.qa.encoders.files import (
    EncoderKind,
    Pooling,
    check_bi_encoder,
    check_cross_encoder,
    embedding_of,
    kind_of,
    longest_input,
    nli_labels,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from gpuherd.qa.encoders.files import EncoderFiles


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
    similarity of beginnings is not one of the texts, so that nothing is cut unless an option requests it.
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

Pair = tuple[str, str]
Read = Callable[[Any, "torch.Tensor"], "torch.Tensor"]  # of a model's output and the attention mask (b, t) makes (b, d)

EXTRAS = {"torch": "qa", "transformers": "qa"}
# Of a batch, padding counted; a transformer encoder's activations are then well below 1 GB.
_MOST_TOKENS = 1 << 15


class Network:
    """A transformer with its tokenizer, on the first GPU that there is, else on the CPU.

    Args:
        files: where it lies.
        head: with its head for sequence classification.
        rows: the most inputs in one pass.
        cut: see ``inputs_of``.

    Raises:
        MissingExtra: torch or transformers is not there.
        MissingModel: no tokenizer.
        BadModel: transformers can't load it, or the checkpoint lacks weights that would be made up at random.
    """

    def __init__(self, files: EncoderFiles, *, head: bool, rows: int = 64, cut: bool = False) -> None:
        with naming_extras(EXTRAS, "comparing texts with models takes"):
            import torch
            import transformers
        from gpuherd.models.load.identity import tokenizer_in

        self.name = files.name
        self.rows = rows
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = tokenizer_in(files.folder)
        self.padding = padding_id(self.tokenizer, files.name)
        loader = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
        self.model = _model(loader, files, torch.float32).to(self.device).eval()
        limit = getattr(self.tokenizer, "model_max_length", None)
        sentence = None if head else files.settings("sentence_bert_config.json")
        self._longest = longest_input(files.config, None if limit is None else int(limit), sentence)
        self._cut = cut

    def of_pairs(self, pairs: Sequence[Pair], read: Read) -> list[NDArray[np.float32] | None]:
        """``of_texts`` for both texts of each pair in one input; equal pairs are computed once."""
        unique = list(dict.fromkeys(pairs))
        firsts, seconds = [pair[0] for pair in unique], [pair[1] for pair in unique]
        found = dict(zip(unique, self.of_texts(firsts, read, seconds), strict=True))
        return [found[pair] for pair in pairs]

    def of_texts(
        self, texts: Sequence[str], read: Read, others: Sequence[str] | None = None
    ) -> list[NDArray[np.float32] | None]:
        """The output of ``read`` for each text, (d,) float32; None where it is too long for the model."""
        inputs = inputs_of(self.tokenizer, texts, others, longest=self._longest, cut=self._cut)
        fitting = [given for given in inputs if given is not None]
        rows = iter(self.run(fitting, read) if fitting else ())
        return [None if given is None else next(rows) for given in inputs]

    def run(self, inputs: Sequence[Input], read: Read) -> NDArray[np.float32]:
        """The output of ``read`` for each input: float32, (n, d), in the order of the inputs.

        Args:
            inputs: one or more.
            read: what is taken of the model's output.
        """
        import numpy as np

        lengths = [len(each.token_ids) for each in inputs]
        batches = plan_batches(lengths, rows=self.rows, most_tokens=_MOST_TOKENS)
        found = halving(batches, lambda batch: list(self._pass([inputs[number] for number in batch], read)))
        return np.stack([found[number] for number in range(len(inputs))])

    def _pass(self, inputs: Sequence[Input], read: Read) -> NDArray[np.float32]:
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
            output = read(self.model(**given), mask).float()
        if not bool(torch.isfinite(output).all()):
            raise BadModel(f"{quoted(self.name)} gives numbers that are not finite; its weights are damaged")
        found: NDArray[np.float32] = output.cpu().numpy()
        return found


def _model(loader: Any, files: EncoderFiles, dtype: Any) -> Any:
    try:
        with no_progress_bars():
            model, report = loader.from_pretrained(
                files.folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as problem:
        raise BadModel(f"transformers can't load {quoted(files.name)}: {problem}") from None
    # A pooler's weights are often not there, and are used by a head alone, whose checkpoint then has them.
    bare = loader.__name__ == "AutoModel"
    missing = sorted(key for key in report["missing_keys"] if not (bare and key.startswith("pooler.")))
    if missing or report["mismatched_keys"]:
        first = (missing or [str(sorted(report["mismatched_keys"])[0])])[0]
        raise BadModel(
            f"{quoted(files.name)} lacks weights that it would need for this ({len(missing)}, such as {first}): it was "
            "not trained for it"
        )
    return model


# How similar two texts are, g in [0, 1], by a cross-encoder or a bi-encoder. Never rescaled.
#
# The similarity of SAR (Duan et al., ACL 2024, arXiv 2307.01379). A cross-encoder's is the sigmoid of its one logit,
# which lies in [0, 1] as it is: to divide it by 5, as if it were a score from 0 to 5, makes all relevances the same.
# A bi-encoder's is the cosine of two vectors; where that is below 0 it is 0.


class Similarity(Protocol):
    """A model that compares texts."""

    def of_pairs(self, pairs: Sequence[Pair]) -> list[float | None]:
        """g of each pair, in [0, 1]; None where the pair is too long for the model."""


class CrossEncoder:
    """One label, both texts in one input."""

    def __init__(self, files: EncoderFiles, *, cut: bool = False, rows: int = 64) -> None:
        check_cross_encoder(files.name, files.config)
        self._network = Network(files, head=True, rows=rows, cut=cut)

    def of_pairs(self, pairs: Sequence[Pair]) -> list[float | None]:
        """g of each pair: (first, second) as given, which a cross-encoder may tell from (second, first)."""
        rows = self._network.of_pairs(pairs, _logits)
        return [None if row is None else float(_sigmoid(row)[0]) for row in rows]


class BiEncoder:
    """A vector a text; each text is encoded once."""

    def __init__(self, files: EncoderFiles, *, cut: bool = False, rows: int = 64) -> None:
        modules = files.settings("modules.json")
        check_bi_encoder(files.name, files.config, modules)
        paths = [str(each.get("path")) for each in modules or () if isinstance(each, dict)]
        poolings = {path: files.settings(f"{path}/config.json") for path in paths if path and _is_file_name(path)}
        sentence = files.settings("sentence_bert_config.json")
        prompts = files.settings("config_sentence_transformers.json")
        self._how = embedding_of(files.name, modules, poolings, sentence, prompts)
        self._network = Network(files, head=False, rows=rows, cut=cut)

    def of_pairs(self, pairs: Sequence[Pair]) -> list[float | None]:
        """Cosine of each pair, cut off below 0 and above 1."""
        import numpy as np

        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = {
            text: vector.astype(np.float64)
            for text, vector in zip(texts, self.vectors(texts), strict=True)
            if vector is not None
        }
        return [
            _cosine(vectors[first], vectors[second]) if first in vectors and second in vectors else None
            for first, second in pairs
        ]

    def vectors(self, texts: Sequence[str]) -> list[NDArray[np.float32] | None]:
        """The vector of each text, float32, of length 1; None where the text is too long for the model."""
        said = [self._how.prefix + (text.lower() if self._how.lower_case else text) for text in texts]
        return self._network.of_texts(said, _mean if self._how.pooling is Pooling.MEAN else _first)


def similarity_model(
    files: EncoderFiles, kind: EncoderKind | None = None, *, cut: bool = False, rows: int = 64
) -> Similarity:
    """The model in memory, of this kind, or of that which its config names. Raises as ``Network``, and BadModel where
    it can't be used in this way."""
    chosen = kind_of(files.config) if kind is None else kind
    return (CrossEncoder if chosen is EncoderKind.CROSS else BiEncoder)(files, cut=cut, rows=rows)


def self_similarity(model: Similarity, texts: Sequence[str]) -> float | None:
    """The smallest g(a, a) of these texts: a model of similarity has it near 1. None where no text fits."""
    found = [value for value in model.of_pairs([(text, text) for text in texts]) if value is not None]
    return min(found, default=None)


def _is_file_name(path: str) -> bool:
    """Whether a module's path is a name in the model's own folder."""
    return path not in (".", "..") and "/" not in path and "\\" not in path


def _logits(output: Any, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - what ``Network.run`` calls
    logits: torch.Tensor = output.logits
    return logits


def _mean(output: Any, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the last layer's states over the tokens that are not padding, divided by its length."""
    import torch

    states = output.last_hidden_state
    weights = mask.unsqueeze(-1).to(states.dtype)
    # As sentence-transformers divides: by 1e-9 at least.
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


def _first(output: Any, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    import torch

    return torch.nn.functional.normalize(output.last_hidden_state[:, 0], dim=1)


def _cosine(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Of two vectors of length 1 (to float32); that of a vector with itself is 1."""
    return 1.0 if first is second else min(1.0, max(0.0, float(first @ second)))


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)) in float64, exact at both ends."""
    import numpy as np

    wide = logits.astype(np.float64)
    half = np.exp(-np.abs(wide))
    found: NDArray[np.float64] = np.where(wide >= 0, 1 / (1 + half), half / (1 + half))
    return found


# Does one text follow from another? A model that says so, and when two answers mean the same by it.
#
# Relations are probabilities, kept as they are; the rules that make clusters of them can be changed without the
# model.


class EntailmentQuery(NamedTuple):
    """Does the hypothesis follow from the premise, as answers to this question?"""

    question: str
    premise: str
    hypothesis: str


@dataclass(frozen=True, slots=True)
class NliRelation:
    """Of a premise and a hypothesis: probabilities that add up to 1."""

    entailment: float
    neutral: float
    contradiction: float

    @property
    def label(self) -> str:
        """The most probable one; of equal ones the most careful: contradiction, then neutral."""
        best = max(self.entailment, self.neutral, self.contradiction)
        if self.contradiction == best:
            return "contradiction"
        return "neutral" if self.neutral == best else "entailment"


class Entailment(Protocol):
    """A model that relates texts."""

    def relations(self, queries: Sequence[EntailmentQuery]) -> list[NliRelation | None]:
        """The relation of each; None where the texts are too long for the model."""


# --- by a model of natural language inference -------------------------------------------------------------------------


class NliModel:
    """An encoder of a premise and a hypothesis in one input, with three labels, found by their names.

    Args:
        files: the model.
        condition_on_question: put the question before both texts, as Kuhn et al. 2023 do.
        cut: see ``inputs_of``.
        rows: the most pairs in one pass.
    """

    def __init__(
        self, files: EncoderFiles, *, condition_on_question: bool = False, cut: bool = False, rows: int = 64
    ) -> None:
        self._labels = nli_labels(files.name, files.config)
        self._network = Network(files, head=True, rows=rows, cut=cut)
        self._with_question = condition_on_question

    def relations(self, queries: Sequence[EntailmentQuery]) -> list[NliRelation | None]:
        """The relation of each (premise, hypothesis). Equal inputs are computed once."""
        rows = self._network.of_pairs([self._texts(each) for each in queries], _probabilities)
        labels = (self._labels.entailment, self._labels.neutral, self._labels.contradiction)
        return [None if row is None else NliRelation(*(float(row[label]) for label in labels)) for row in rows]

    def _texts(self, query: EntailmentQuery) -> tuple[str, str]:
        before = f"{query.question.strip()} " if self._with_question else ""
        return before + query.premise, before + query.hypothesis


def _probabilities(output: Any, mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - what ``Network.run`` calls
    probabilities: torch.Tensor = output.logits.float().softmax(-1)
    return probabilities
