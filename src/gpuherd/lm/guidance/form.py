"""What a classifier is, as its ``classifier.json`` says it: plain frozen data, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from gpuherd.errors import BadModel, MissingModel, UsageError

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
        tokenizer_sha256: of its tokens and their ids (``tokens.tokens_digest``).
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
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``. Raises KeyError, TypeError, ValueError, OverflowError, UsageError for other things."""
        found = {name: value for name, value in values.items() if name != "format"}
        kinds = {"atoms": list | tuple, "tokenizer_sha256": str, "made_from": str, "loss": str | None, "trained": dict}
        for name, kind in kinds.items():
            if not isinstance(found[name], kind):
                raise TypeError(f"{name} is a {type(found[name]).__name__}")
        atoms = tuple(float(each) for each in found["atoms"])
        return cls(**{**found, "kind": Kind(found["kind"]), "head": Head(found["head"]), "atoms": atoms})


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
        return ClassifierForm.from_dict(values)
    except (KeyError, TypeError, ValueError, OverflowError, UsageError) as problem:
        raise BadModel(f"{path} doesn't say what the classifier is: {problem}") from None
