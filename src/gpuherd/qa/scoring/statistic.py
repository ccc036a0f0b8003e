"""What is measured once and kept beside the answers: of which kind, by which model, how. Pure; no files, no models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.qa.span import Span, span_in

FORMAT = 1


class BadStatistic(GpuherdError):
    """A statistic's files are damaged, of a newer gpuherd, or not of this run."""

    exit_code = ExitCode.BAD_INPUT


class Kind(StrEnum):
    """What is measured."""

    RELEVANCE = "relevance"  # of each token of the greedy answers, or of the samples
    SIMILARITY = "similarity"  # of each pair of samples
    ENTAILMENT = "entailment"  # of each ordered pair of samples
    P_TRUE = "p-true"  # log p of "true" for the main answer
    HIDDEN = "hidden"  # the generator's last hidden state behind the prompt

    @property
    def by_encoder(self) -> bool:
        """Whether an encoder measures it always; entailment has it in its settings."""
        return self in (Kind.RELEVANCE, Kind.SIMILARITY)


@dataclass(frozen=True, slots=True)
class Spec:
    """A statistic before it is measured: all that its values depend on besides the answers.

    Attributes:
        kind: what.
        model: as the user named it.
        model_sha256: of the model's files.
        settings: how, as plain JSON values.
    """

    kind: Kind
    model: str
    model_sha256: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its files: the kind and 8 hex digits. The model's name has no part in it, its files have."""
        text = json.dumps([self.kind.value, self.model_sha256, dict(self.settings)], sort_keys=True)
        return f"{self.kind.value}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"

    @property
    def span(self) -> Span:
        """Which part of the generations it is of; one that names none is of all that was written."""
        return span_in(self.settings)

    @property
    def by_encoder(self) -> bool:
        """Whether an encoder measures it, not a language model."""
        return self.kind.by_encoder or self.settings.get("by") == "nli"


@dataclass(frozen=True, slots=True)
class Meta:
    """A statistic that is whole.

    Attributes:
        spec: what it is.
        answers_sha256: of the run's answers that it was measured on.
        sha256: of its file.
        items: how many questions it has, and of these
        undefined: how many have no value, by reason.
        remarks: what people should know of it.
        versions: of the libraries that took part.
        made: when, as ISO 8601 in UTC.
    """

    spec: Spec
    answers_sha256: str
    sha256: str
    items: int
    undefined: Mapping[str, int]
    remarks: tuple[str, ...]
    versions: Mapping[str, str]
    made: str

    @property
    def name(self) -> str:
        """Of its files."""
        return self.spec.name


def spec_values(spec: Spec) -> dict[str, Any]:
    """The statistic as JSON values."""
    return {
        "kind": spec.kind.value,
        "model": spec.model,
        "model_sha256": spec.model_sha256,
        "settings": dict(spec.settings),
    }


def spec_of(value: Any) -> Spec:
    """What ``spec_values`` described. Raises BadStatistic."""
    try:
        return Spec(Kind(value["kind"]), str(value["model"]), str(value["model_sha256"]), dict(value["settings"]))
    except (ValueError, KeyError, TypeError) as problem:
        raise BadStatistic(f"no description of a statistic: {type(problem).__name__}: {problem}") from None


def meta_values(meta: Meta) -> dict[str, Any]:
    """The statistic as JSON values, as they stand in its ``.json``."""
    return {
        "format": FORMAT,
        "name": meta.name,
        **spec_values(meta.spec),
        "answers_sha256": meta.answers_sha256,
        "sha256": meta.sha256,
        "items": meta.items,
        "undefined": dict(meta.undefined),
        "remarks": list(meta.remarks),
        "versions": dict(meta.versions),
        "made": meta.made,
    }


def meta_of(value: Any) -> Meta:
    """What ``meta_values`` described. Raises BadStatistic."""
    if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
        raise BadStatistic(
            f"written by a newer gpuherd (format {value['format']}, known here: {FORMAT}); update gpuherd"
        )
    try:
        return Meta(
            spec=spec_of(value),
            answers_sha256=str(value["answers_sha256"]),
            sha256=str(value["sha256"]),
            items=int(value["items"]),
            undefined={str(reason): int(number) for reason, number in value["undefined"].items()},
            remarks=tuple(str(each) for each in value["remarks"]),
            versions={str(library): str(version) for library, version in value["versions"].items()},
            made=str(value["made"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise BadStatistic(f"no description of a statistic: {type(problem).__name__}: {problem}") from None
