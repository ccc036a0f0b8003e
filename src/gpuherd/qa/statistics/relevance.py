"""Relevance: how much each token of an answer matters (SAR), by a model of similarity; of greedy answers or samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from gpuherd.options import option
from gpuherd.qa.measures.evidence import Need
from gpuherd.qa.record import Answered, Generation
from gpuherd.qa.span import Span, part_of, span_setting
from gpuherd.qa.statistics.files import Spec, line, short
from gpuherd.qa.statistics.registry import (
    NO_ANSWER,
    TOO_LONG,
    CommonOptions,
    Cost,
    Has,
    JobInputs,
    Measuring,
    Planning,
    Source,
    Statistic,
    ValueInputs,
    Values,
    planned_or_there,
    register,
)
from gpuherd.qa.statistics.similarity_model import (
    EncoderWord,
    loaded_similarity,
    self_similarity_remarks,
    similarity_settings,
)

if TYPE_CHECKING:
    from gpuherd.qa.encoders.similarity import Similarity

# Of each need which answers it is of, and what its statistic is called among those planned.
_OF = {Need.RELEVANCE: ("greedy", "relevance"), Need.SAMPLE_RELEVANCE: ("samples", "sample-relevance")}


@dataclass(frozen=True, kw_only=True)
class RelevanceOptions(CommonOptions):
    """Which model says how much each token matters."""

    relevance_model: str | None = option(
        None,
        help="model of similarity that says how much each token matters (SAR), such as "
        "cross-encoder/stsb-roberta-large",
        metavar="PATH_OR_ID",
        group="models",
    )
    relevance_kind: EncoderWord | None = option(
        None, help="how it compares texts (default: as its config says)", choices=get_args(EncoderWord), group="models"
    )

    def contradictions(self) -> list[tuple[bool, str]]:
        """Without a model there is nothing to say of how it compares."""
        return [
            *super().contradictions(),
            (
                self.relevance_kind is not None and self.relevance_model is None,
                "--relevance-kind says how --relevance-model compares; name that",
            ),
        ]


class Relevance(Statistic[RelevanceOptions]):
    """R of each token, of the greedy answers or of the samples: two statistics of one kind, by one model."""

    kind = "relevance"
    options = RelevanceOptions
    needs = tuple(_OF)

    def plan(self, options: RelevanceOptions, planning: Planning) -> dict[str, Spec]:
        """The relevance that is needed, of the model that is named."""
        needed = {name: answers for need, (answers, name) in _OF.items() if need in planning.needs}
        if options.relevance_model is None or not needed:
            return {}
        files, settings = similarity_settings(options.relevance_model, options.relevance_kind, options)
        settings |= span_setting(options.span)
        return {
            name: Spec(self.kind, files.name, files.sha256, {**settings, "answers": answers})
            for name, answers in needed.items()
        }

    def sources(self, options: RelevanceOptions, has: Has, planned: Mapping[str, Spec]) -> dict[str, Source | str]:
        """That of the model that is named, else the latest one."""
        remedy = "--relevance-model names a model that measures it"
        return {
            need: planned_or_there(
                planned.get(name),
                has.latest(self.kind, options.span, answers=answers, long_texts=options.long_texts),
                remedy,
            )
            for need, (answers, name) in _OF.items()
        }

    def by_encoder(self, spec: Spec) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def cost(self, spec: Spec, answers: Sequence[Answered]) -> Cost:
        """An answer of n tokens makes n texts of about n tokens."""
        which = spec.settings["answers"]
        lengths = [[len(each.token_ids) for each in _generations(answered, which)] for answered in answers]
        return Cost(tuple(sum(each * each for each in tokens) + 1 for tokens in lengths))

    def job(self, spec: Spec, inputs: JobInputs) -> Measuring:
        """By the model of similarity."""
        model, seen = loaded_similarity(inputs)
        which = spec.settings["answers"]
        return Measuring(lambda batch: measure_relevance(model, batch, which, spec.span), seen)

    def remarks(self, seen: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
        """Whether the model finds a text similar to itself."""
        return self_similarity_remarks(seen)

    def values(self, given: ValueInputs[RelevanceOptions]) -> Values:
        """Of each question a list of numbers for each of its answers."""
        return Values([row["relevance"] for row in given.rows or ()])


RELEVANCE = register(Relevance())


def measure_relevance(model: Similarity, answered: Sequence[Answered], which: str, span: Span) -> list[str]:
    """``relevance``: for the greedy answer (``which`` is greedy) or each sample a list of a number a token."""
    from gpuherd.qa.encoders.similarity import Pieces, relevances

    chosen = [_generations(each, which) for each in answered]
    flat = [
        Pieces(each.question.question, part_of(generation, span).pieces)
        for each, generations in zip(answered, chosen, strict=True)
        for generation in generations
    ]
    unique = list(dict.fromkeys(flat))
    found = dict(zip(unique, relevances(model, unique), strict=True))
    values = iter([found[each] for each in flat])
    lines = []
    for each, generations in zip(answered, chosen, strict=True):
        lists = [next(values) for _ in generations]
        whole = all(relevance is not None for relevance in lists)
        why = None if whole and lists else (TOO_LONG if lists else NO_ANSWER)
        shown = [[short(value) for value in relevance or ()] for relevance in lists]
        lines.append(line(each, {"relevance": None if why else shown}, why))
    return lines


def _generations(answered: Answered, which: str) -> tuple[Generation, ...]:
    if which == "samples":
        return answered.samples
    return () if answered.greedy is None else (answered.greedy,)
