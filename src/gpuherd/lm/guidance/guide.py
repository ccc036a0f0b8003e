"""A classifier that guides a model while it decodes, as plain frozen data, and the arithmetic of the guided
distribution. torch is imported inside functions only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.runs import records

if TYPE_CHECKING:
    import torch


class Mode(StrEnum):
    """What is added to a candidate's logit, of the distribution of the reward that the classifier predicts."""

    BERNOULLI = "bernoulli"  # Q# with a reward of 0 or 1: ln(1 - p + p e^(1/eta))
    DISTRIBUTIONAL = "distributional"  # Q# with atoms: ln sum_i p_i e^(a_i/eta)
    EXPECTATION = "expectation"  # CD: the expected reward over eta


@dataclass(frozen=True, slots=True)
class Guide:
    """A classifier and how it is used.

    Attributes:
        classifier: its folder (``lm.guidance.classifier``).
        eta: of the papers (arXiv 2502.20548, 2507.20067): the weight of the KL divergence from the reference. Small
            guides strongly; as it grows the reference is left as it is. (PITA's public code calls 1/eta eta.)
        mode: what is added.
        top_k: so many of the reference's most probable tokens are candidates; all others are never chosen.
    """

    classifier: str
    eta: float = 0.1
    mode: Mode = Mode.BERNOULLI
    top_k: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.eta <= math.inf or math.isinf(1 / self.eta):
            raise UsageError(
                f"eta={self.eta}; it is above 0, and 1/eta is finite (the papers' eta; small guides strongly)"
            )
        if self.top_k < 1:
            raise UsageError(f"top_k={self.top_k}; the least is 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``."""
        return cls(**{**values, "mode": Mode(values["mode"])})


# --- The classifier, as its ``classifier.json`` describes it ----------------------------------------------------------

FORMAT = 1
FILE = "classifier.json"
HEAD_FILE = "value_head.safetensors"


class Kind(StrEnum):
    """Where the value of a token is read."""

    V = "v"  # at the token itself, read behind its prefix
    Q = "q"  # at the prefix's last token, which tells the values of all tokens that may follow


class Head(StrEnum):
    """What is predicted of the reward."""

    BERNOULLI = "bernoulli"  # one logit: of the probability that it is 1 and not 0
    ATOMS = "atoms"  # a logit for each of several rewards


@dataclass(frozen=True, slots=True)
class ClassifierForm:
    """What a classifier's weights mean.

    Attributes:
        kind, head: where and what it predicts.
        atoms: the rewards that a head of atoms predicts, in its order; empty for a Bernoulli head.
        tokenizer_sha256: of its tokens and their ids (``tokens_digest``).
        made_from: the model that its body began as.
        loss: by which loss it was trained; None: not trained.
        trained: how, for people.
    """

    kind: Kind
    head: Head
    atoms: tuple[float, ...]
    tokenizer_sha256: str
    made_from: str
    loss: str | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.head is Head.BERNOULLI and self.atoms:
            raise UsageError("a Bernoulli head has no atoms")
        if self.head is Head.ATOMS and (len(self.atoms) < 2 or not all(map(math.isfinite, self.atoms))):
            raise UsageError(f"atoms={list(self.atoms)}; a head of atoms has at least two, all finite")

    @property
    def width(self) -> int:
        """Logits that are predicted of each token."""
        return max(1, len(self.atoms))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT, **records.jsonable(self)}


def read_form(folder: Path) -> ClassifierForm:
    """Of a classifier's folder. Raises MissingModel where there is none, BadModel where it is damaged."""
    path = folder / FILE
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise MissingModel(
            f"{folder} is no classifier: it has no {FILE}; train one with a guided algorithm (Q#, PITA, CD)"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise BadModel(f"{path} can't be read: {problem}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BadModel(f"{path}: it is of another format than {FORMAT}; it was written by another version of gpuherd")
    try:
        form: ClassifierForm = records.read(ClassifierForm, values)
    except (KeyError, TypeError, ValueError, UsageError) as problem:
        raise BadModel(f"{path} doesn't say what the classifier is: {problem}") from None
    return form


# --- Whether policy and classifier mean the same by a token id: else a classifier guides to nonsense ------------------


def tokens_digest(tokens: Mapping[str, int]) -> str:
    """SHA-256 of tokens and their ids, as ``tokenizer.get_vocab()`` gives them, in whatever order."""
    text = json.dumps(sorted(tokens.items(), key=lambda each: (each[1], each[0])), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def first_difference(policy: Mapping[str, int], other: Mapping[str, int], name: str = "the classifier") -> str | None:
    """A sentence about the first id that the two mean different tokens by; None where all are the same. ``name``: what
    it calls the other model.

    >>> first_difference({"a": 0, "b": 1}, {"a": 0, "c": 1})
    "id 1 is 'b' to the policy and 'c' to the classifier"
    """
    mine, theirs = _by_id(policy), _by_id(other)
    for number in sorted(mine.keys() | theirs.keys()):
        if mine.get(number) != theirs.get(number):
            told = [_format_tokens(each.get(number)) for each in (mine, theirs)]
            return f"id {number} is {told[0]} to the policy and {told[1]} to {name}"
    return None


def refuse_other_tokens(policy: Mapping[str, int], classifier: Mapping[str, int], name: str) -> None:
    """Raises UsageError where a policy and the classifier of this name don't share their tokens."""
    difference = first_difference(policy, classifier)
    if difference is not None:
        raise UsageError(
            f"classifier {name} can't guide this policy: they have other tokenizers: {difference}. Make the classifier "
            "from a model that shares the policy's tokenizer (a smaller one of its family)"
        )


def _by_id(tokens: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Added tokens may share an id with one of the vocabulary."""
    found: dict[int, tuple[str, ...]] = {}
    for token, number in sorted(tokens.items()):
        found[number] = (*found.get(number, ()), token)
    return found


def _format_tokens(tokens: tuple[str, ...] | None) -> str:
    return "no token" if tokens is None else " or ".join(map(repr, tokens))


# ---- the guided distribution: the reference's most probable tokens, reweighed by a classifier. Pure ------------------
#
# eta is that of the papers: the optimum of E[r] - eta KL(pi || pi_ref) with a reward at the end is
#
#     pi(y | x)  proportional to  pi_ref(y | x) E[exp(r / eta)],
#
# the expectation over what follows y under pi_ref (Zhou et al. 2025, arXiv 2502.20548, equations 4 and 5). A small
# eta guides strongly. eta has this meaning everywhere in gpuherd.


def offsets(values: torch.Tensor, mode: Mode, eta: float, atoms: Sequence[float] = ()) -> torch.Tensor:
    """What is added to the log-prob of each candidate, float64.

    Args:
        values: the classifier's logits: (...) for a Bernoulli head, (..., atoms) where atoms are given.
        mode: BERNOULLI (Q#): ln(1 - p + p e^(1/eta)) with p = sigmoid(value). DISTRIBUTIONAL (Q#):
            ln sum_i p_i e^(a_i/eta) with p = softmax(values). EXPECTATION (controlled decoding, Mudgal et al. 2024,
            arXiv 2310.17022): the expected reward over eta, of either head.
        eta: above 0; with infinity all are 0.
        atoms: the rewards that a distributional head predicts, in its order.

    Raises UsageError where the mode and the head don't go together.
    """
    import torch
    from torch.nn.functional import logsigmoid

    refuse_mode(mode, atoms=bool(atoms))
    wide = values.double()
    if not atoms:
        if mode is Mode.EXPECTATION:
            return torch.sigmoid(wide) / eta
        return torch.logaddexp(logsigmoid(-wide), logsigmoid(wide) + 1 / eta)
    rewards = torch.tensor(list(atoms), dtype=torch.float64, device=wide.device)
    if mode is Mode.EXPECTATION:
        return torch.softmax(wide, dim=-1) @ rewards / eta
    return torch.logsumexp(torch.log_softmax(wide, dim=-1) + rewards / eta, dim=-1)


def refuse_mode(mode: Mode, *, atoms: bool) -> None:
    """Raises UsageError where a classifier with, or without, atoms can't guide in this mode."""
    if mode is Mode.BERNOULLI and atoms:
        raise UsageError("guide mode bernoulli: the classifier predicts atoms of a reward; use distributional")
    if mode is Mode.DISTRIBUTIONAL and not atoms:
        raise UsageError("guide mode distributional: the classifier predicts one probability; use bernoulli")


@dataclass(frozen=True, eq=False, slots=True)
class GuidedDistribution:
    """The guided distribution behind each row, at temperature 1; all but its candidates have the probability 0.

    Attributes:
        candidates: (rows, k) int64, most probable under the reference first.
        log_probs: (rows, k) float64, natural.
        kl: (rows,) float64, nats: KL(guided || reference) over the whole vocabulary, sum_c pi(c) ln(pi(c) / pi_ref(c)).
    """

    candidates: torch.Tensor
    log_probs: torch.Tensor
    kl: torch.Tensor

    def scores(self, vocabulary: int) -> torch.Tensor:
        """(rows, vocabulary) float32 log-probs, -inf for what is no candidate."""
        import torch

        scores = torch.full((len(self.candidates), vocabulary), -torch.inf, device=self.candidates.device)
        return scores.scatter_(1, self.candidates, self.log_probs.float())

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The log-probs of tokens (rows,), float64; -inf where one is no candidate."""
        import torch

        found = self.candidates == tokens[:, None]
        return torch.where(found, self.log_probs, -torch.inf).amax(dim=1)


def most_probable(logits: torch.Tensor, top_k: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's ``top_k`` most probable tokens of each row with their log-probs: (rows, k) int64 and float64.

    Args:
        logits: (rows, tokens), of any float dtype; the log-probs are of their whole softmax, in float32.
        vocabulary: ids from here on the classifier has no embedding of: rows that models are padded by, which stand
            for no token. They are no candidates.
    """
    import torch

    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    usable = log_probs[:, :vocabulary]
    best = usable.topk(min(top_k, usable.shape[1]), dim=-1)
    return best.indices, best.values.double()


def guided_distribution(candidates: torch.Tensor, reference: torch.Tensor, added: torch.Tensor) -> GuidedDistribution:
    """The distribution in proportion to pi_ref e^added on the candidates.

    With equal ``added`` (eta infinite, or a classifier that knows nothing) it is the reference's, restricted to them.

    Args:
        candidates: (rows, k).
        reference: (rows, k) float64, the reference's log-probs of them.
        added: (rows, k) float64, ``offsets.offsets``.
    """
    import torch

    log_probs = torch.log_softmax(reference + added, dim=-1)
    # A candidate that can't come (-inf: a vocabulary of few) adds nothing, and not 0 times infinity.
    terms = torch.where(log_probs.isneginf(), 0.0, log_probs.exp() * (log_probs - reference))
    return GuidedDistribution(candidates, log_probs, terms.sum(dim=-1))
