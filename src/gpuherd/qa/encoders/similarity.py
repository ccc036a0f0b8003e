"""How similar two texts are, g in [0, 1], by a cross-encoder or a bi-encoder. Never rescaled.

The similarity of SAR (Duan et al., ACL 2024, arXiv 2307.01379). A cross-encoder's is the sigmoid of its one logit,
which lies in [0, 1] as it is: to divide it by 5, as if it were a score from 0 to 5, makes all relevances the same. A
bi-encoder's is the cosine of two vectors; where that is below 0 it is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gpuherd.qa.encoders.config import (
    EncoderKind,
    Pooling,
    check_bi_encoder,
    check_cross_encoder,
    embedding_of,
    kind_of,
    longest_input,
)
from gpuherd.qa.encoders.network import Network, inputs_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from gpuherd.qa.encoders.model_files import EncoderFiles

Pair = tuple[str, str]


class Similarity(Protocol):
    """What compares texts."""

    def of_pairs(self, pairs: Sequence[Pair]) -> list[float | None]:
        """g of each pair, in [0, 1]; None where the pair is too long for the model."""


class CrossEncoder:
    """One label, both texts in one input."""

    def __init__(self, files: EncoderFiles, *, cut: bool = False, rows: int = 64) -> None:
        check_cross_encoder(files.name, files.config)
        self._network = Network(files, head=True, rows=rows)
        self._cut = cut
        self._longest = longest_input(files.config, self._network.tokenizer_limit)

    def of_pairs(self, pairs: Sequence[Pair]) -> list[float | None]:
        """g of each pair: (first, second) as given, which a cross-encoder may tell from (second, first)."""
        unique = list(dict.fromkeys(pairs))
        firsts, seconds = [pair[0] for pair in unique], [pair[1] for pair in unique]
        inputs = inputs_of(self._network.tokenizer, firsts, seconds, longest=self._longest, cut=self._cut)
        fitting = [(pair, given) for pair, given in zip(unique, inputs, strict=True) if given is not None]
        if not fitting:
            return [None] * len(pairs)
        logits = self._network.run([given for _, given in fitting], _logits)
        found = dict(zip([pair for pair, _ in fitting], _sigmoid(logits[:, 0]).tolist(), strict=True))
        return [found.get(pair) for pair in pairs]


class BiEncoder:
    """A vector a text; each text is encoded once."""

    def __init__(self, files: EncoderFiles, *, cut: bool = False, rows: int = 64) -> None:
        modules = files.settings("modules.json")
        check_bi_encoder(files.name, files.config, modules)
        paths = [str(each.get("path")) for each in modules or () if isinstance(each, dict)]
        poolings = {path: files.settings(f"{path}/config.json") for path in paths if path and _is_plain(path)}
        sentence = files.settings("sentence_bert_config.json")
        prompts = files.settings("config_sentence_transformers.json")
        self._how = embedding_of(files.name, modules, poolings, sentence, prompts)
        self._network = Network(files, head=False, rows=rows)
        self._cut = cut
        self._longest = longest_input(files.config, self._network.tokenizer_limit, sentence)

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
        inputs = inputs_of(self._network.tokenizer, said, None, longest=self._longest, cut=self._cut)
        fitting = [number for number, given in enumerate(inputs) if given is not None]
        found: list[NDArray[np.float32] | None] = [None] * len(texts)
        if fitting:
            read = _mean if self._how.pooling is Pooling.MEAN else _first
            rows = self._network.run([given for given in inputs if given is not None], read)
            for number, row in zip(fitting, rows, strict=True):
                found[number] = row
        return found


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


def _is_plain(path: str) -> bool:
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


# --- relevance: what an answer's meaning loses without a token --------------------------------------------------------
#
# R(z_i) = 1 - |g(x + s, x + s without z_i)| (Duan et al., ACL 2024, arXiv 2307.01379, eq. 3), where x is the
# question, s the answer and g the similarity. Positions come from the tokens that were generated, so that one
# occurrence is taken out, not every occurrence of its string.

# Of texts at once: their token ids, as Python has them, take some ten times as many bytes.
_MOST_CHARACTERS = 1 << 23
_LONG = 128  # tokens, of an answer for which a text more doesn't matter


@dataclass(frozen=True, slots=True)
class Pieces:
    """An answer to a question, divided among its tokens."""

    question: str
    pieces: tuple[str, ...]


def with_question(question: str, answer: str) -> str:
    """x + s: the question, a space and the answer, each without white space at its ends.

    >>> with_question("Capital of France?", " Paris.")
    'Capital of France? Paris.'
    """
    return f"{question.strip()} {answer.strip()}".strip()


def without_each(answer: Pieces) -> Iterator[Pair]:
    """For each token (x + s, x + s without it).

    >>> list(without_each(Pieces("q", (" a", " ban", "ana"))))
    [('q a banana', 'q banana'), ('q a banana', 'q aana'), ('q a banana', 'q a ban')]
    """
    pieces = answer.pieces
    whole = with_question(answer.question, "".join(pieces))
    for number in range(len(pieces)):
        yield whole, with_question(answer.question, "".join((*pieces[:number], *pieces[number + 1 :])))


def relevances(model: Similarity, answers: Sequence[Pieces]) -> list[tuple[float, ...] | None]:
    """R of each token of each answer, in [0, 1]; None for an answer that is too long for the model. Never rescaled.

    Answers are compared together: the more there are, the fuller the batches, and equal texts are encoded once. What
    takes no text away (half of a letter, a special token, white space at an end) has relevance 0, whatever the model
    says of a text and itself: the end token has that too.
    """
    too_long = _too_long(model, answers)
    found: list[tuple[float, ...] | None] = [None] * len(answers)
    for group in _groups([number for number in range(len(answers)) if number not in too_long], answers):
        pairs = [list(without_each(answers[number])) for number in group]
        changed = [pair for each in pairs for pair in each if pair[0] != pair[1]]
        values = iter(model.of_pairs(changed))
        for number, each in zip(group, pairs, strict=True):
            similarities = [1.0 if whole == rest else next(values) for whole, rest in each]
            known = [value for value in similarities if value is not None]
            found[number] = tuple(1 - abs(value) for value in known) if len(known) == len(each) else None
    return found


def _too_long(model: Similarity, answers: Sequence[Pieces]) -> frozenset[int]:
    """The numbers of those of the long answers that the model has no room for.

    An answer of n tokens makes n texts of its length: that it is too long is seen by one of them.
    """
    long = [number for number, each in enumerate(answers) if len(each.pieces) > _LONG]
    found = model.of_pairs([next(without_each(answers[number])) for number in long])
    return frozenset(number for number, value in zip(long, found, strict=True) if value is None)


def _groups(numbers: Sequence[int], answers: Sequence[Pieces]) -> Iterator[list[int]]:
    """The numbers of answers whose texts are compared together, so that these texts stay small in memory."""
    group: list[int] = []
    size = 0
    for number in numbers:
        pieces = answers[number].pieces
        own = len(pieces) * (len(answers[number].question) + sum(map(len, pieces)))
        if group and size + own > _MOST_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(number)
        size += own
    if group:
        yield group
