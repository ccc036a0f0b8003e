"""Similarity: how alike the samples of a question are, each pair, by a cross-encoder or a bi-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, get_args

from gpuherd.options import option
from gpuherd.qa.measures.evidence import Need
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, part_of, span_setting
from gpuherd.qa.statistics.files import Spec, line, short
from gpuherd.qa.statistics.registry import (
    NO_ANSWER,
    TOO_LONG,
    Cost,
    Has,
    JobInputs,
    Measuring,
    Planning,
    Row,
    Source,
    Statistic,
    ValueInputs,
    Values,
    planned_or_there,
    register,
)
from gpuherd.qa.statistics.relevance import RelevanceOptions
from gpuherd.qa.statistics.similarity_model import (
    EncoderWord,
    loaded_similarity,
    self_similarity_remarks,
    similarity_settings,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.qa.encoders.similarity import Similarity

# Equivalence and affinity can be made of the similarity too.
_NEEDED_BY = frozenset({Need.SIMILARITY, Need.EQUIVALENCE, Need.AFFINITY})


@dataclass(frozen=True, kw_only=True)
class SimilarityOptions(RelevanceOptions):
    """Which model compares the samples; that of the relevance where none is named."""

    similarity_model: str | None = option(
        None,
        help="model of the similarity of samples (default: the relevance model)",
        metavar="PATH_OR_ID",
        group="models",
    )
    similarity_kind: EncoderWord | None = option(
        None, help="how it compares texts (default: as its config says)", choices=get_args(EncoderWord), group="models"
    )
    similarity_without_question: bool = option(
        False, help="compare the samples alone; else each with the question before it, as SAR does", group="models"
    )

    def contradictions(self) -> list[tuple[bool, str]]:
        """Without a model there is nothing to say of how it compares."""
        return [
            *super().contradictions(),
            (
                self.similarity_kind is not None and self.similarity_model is None,
                "--similarity-kind says how --similarity-model compares; name that",
            ),
        ]


class SampleSimilarity(Statistic[SimilarityOptions]):
    """g of each pair of samples."""

    kind = "similarity"
    options = SimilarityOptions
    needs = (Need.SIMILARITY,)
    of_samples = True

    def plan(self, options: SimilarityOptions, planning: Planning) -> dict[str, Spec]:
        """The similarity by the model that is named for it, or for the relevance."""
        own = options.similarity_model is not None
        model = options.similarity_model if own else options.relevance_model
        if model is None or not planning.needs & _NEEDED_BY:
            return {}
        return {"similarity": self.spec(options, model, options.similarity_kind if own else options.relevance_kind)}

    def spec(self, options: SimilarityOptions, model: str, word: EncoderWord | None = None) -> Spec:
        """The similarity by this model."""
        files, settings = similarity_settings(model, word, options)
        settings |= {"with_question": not options.similarity_without_question, **span_setting(options.span)}
        return Spec(self.kind, files.name, files.sha256, settings)

    def sources(self, options: SimilarityOptions, has: Has, planned: Mapping[str, Spec]) -> dict[str, Source | str]:
        """That of the model that is named, else the latest one."""
        return {Need.SIMILARITY: self.source(options, has, planned)}

    def source(self, options: SimilarityOptions, has: Has, planned: Mapping[str, Spec]) -> Source | str:
        """Where the similarity is taken from, or why it can't be."""
        with_question = not options.similarity_without_question
        known = has.latest(self.kind, options.span, with_question=with_question, long_texts=options.long_texts)
        remedy = "--similarity-model (or --relevance-model, for both) names a model that measures it"
        return planned_or_there(planned.get("similarity"), known, remedy)

    def by_encoder(self, spec: Spec) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def cost(self, spec: Spec, answers: Sequence[Answered]) -> Cost:  # noqa: ARG002
        """Each sample is read with each other one."""
        return Cost(tuple(tokens_in_pairs(each) for each in answers))

    def job(self, spec: Spec, inputs: JobInputs) -> Measuring:
        """By the model of similarity."""
        model, seen = loaded_similarity(inputs)
        question = bool(spec.settings["with_question"])
        return Measuring(lambda batch: measure_similarity(model, batch, spec.span, question=question), seen)

    def remarks(self, seen: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
        """Whether the model finds a text similar to itself."""
        return self_similarity_remarks(seen)

    def values(self, given: ValueInputs[SimilarityOptions]) -> Values:
        """The matrix of each question."""
        pairs = zip(given.texts, given.rows or (), strict=True)
        return Values([matrix_in(row) if texts else None for texts, row in pairs])


SIMILARITY = register(SampleSimilarity())


def measure_similarity(model: Similarity, answered: Sequence[Answered], span: Span, *, question: bool) -> list[str]:
    """``matrix``: g of each pair of samples, the mean of both orders; of equal texts g(a, a)."""
    from gpuherd.qa.encoders.similarity import with_question

    texts = [sample_texts(each, span) for each in answered]
    if question:
        texts = [
            [with_question(each.question.question, text) for text in said]
            for each, said in zip(answered, texts, strict=True)
        ]
    pairs = list(dict.fromkeys((one, other) for each in texts for one, other in product(dict.fromkeys(each), repeat=2)))
    found = dict(zip(pairs, model.of_pairs(pairs), strict=True))
    lines = []
    for each, said in zip(answered, texts, strict=True):
        values = [[_mean(found[one, other], found[other, one]) for other in said] for one in said]
        why = why_of_samples(said, any(value is None for row in values for value in row))
        lines.append(line(each, {"matrix": None if why else values}, why))
    return lines


def sample_texts(answered: Answered, span: Span) -> list[str]:
    """The part of each sample that a span names."""
    return [part_of(each, span).text for each in answered.samples]


def why_of_samples(texts: Sequence[str], missing: bool) -> str | None:
    """Why samples have no values; None where they have."""
    return NO_ANSWER if not texts else TOO_LONG if missing else None


def tokens_in_pairs(answered: Answered) -> int:
    """About how many tokens are read where each sample is compared with each other one."""
    samples = [len(each.token_ids) for each in answered.samples]
    return (len(samples) or 1) * sum(samples) + 1


def matrix_in(row: Row) -> NDArray[np.float64] | None:
    """g of each pair, symmetric; a sample is similar to itself, whatever a cross-encoder says of it."""
    import numpy as np

    if row["matrix"] is None:
        return None
    matrix = np.array(row["matrix"], dtype=np.float64)
    np.fill_diagonal(matrix, 1.0)
    return matrix


def _mean(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else short((one + other) / 2)
