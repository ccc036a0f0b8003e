"""A model of similarity behind a statistic: found and checked before any job, tried in the job. No torch to plan it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.lm.backend import Generation
from gpuherd.options import option
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, part_of, span_setting
from gpuherd.qa.statistics.files import StatisticSpec, line, short
from gpuherd.qa.statistics.registry import (
    NO_ANSWER,
    TOO_LONG,
    BatchMeasurer,
    CommonOptions,
    Has,
    JobInputs,
    NeedSource,
    Planned,
    Planning,
    Row,
    Statistic,
    StatisticCost,
    ValueInputs,
    Values,
    planned_or_there,
    register,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.qa.encoders.files import EncoderFiles
    from gpuherd.qa.encoders.models import Pair, Similarity

EncoderWord = Literal["cross-encoder", "bi-encoder"]

_TRIED = 16  # texts that a model of similarity is tried on
_LOW_SELF_SIMILARITY = 0.9  # below this a model does not even find a text similar to itself


@lru_cache(maxsize=8)
def encoder_of(name: str) -> EncoderFiles:
    """The encoder's files, read once by a command. Raises MissingModel, BadModel."""
    from gpuherd.qa.encoders.files import encoder_files

    return encoder_files(name)


def similarity_settings(
    name: str, word: EncoderWord | None, options: CommonOptions
) -> tuple[EncoderFiles, dict[str, Any]]:
    """The files of a model of similarity, and what its figures depend on. ``word``: how it compares texts, where that
    is not what its config says. Raises MissingModel, BadModel."""
    from gpuherd.qa.encoders.files import EncoderKind, check_bi_encoder, check_cross_encoder, kind_of

    files = encoder_of(name)
    kind = kind_of(files.config) if word is None else EncoderKind(word)
    if kind is EncoderKind.CROSS:
        check_cross_encoder(files.name, files.config)
    else:
        check_bi_encoder(files.name, files.config, files.settings("modules.json"))
    return files, {"encoder": kind.value, "long_texts": options.long_texts}


def loaded_similarity(inputs: JobInputs) -> tuple[Similarity, partial[Mapping[str, Any]]]:
    """A job's model of similarity in memory, and what is seen of it: how similar it finds a text to itself."""
    from gpuherd.qa.encoders.files import EncoderKind
    from gpuherd.qa.encoders.models import self_similarity, similarity_model

    settings = inputs.spec.settings
    cut = settings["long_texts"] == "cut"
    kind = EncoderKind(settings["encoder"])
    model = similarity_model(inputs.encoder(), kind, cut=cut, rows=inputs.options.batch_size)
    lowest = self_similarity(model, [each.question.question for each in inputs.answers[:_TRIED]])
    return model, partial(dict, self_similarity=lowest)


def self_similarity_remarks(seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A sentence where the model does not find a text similar to itself."""
    lowest = min((each["self_similarity"] for each in seen if each.get("self_similarity") is not None), default=None)
    if lowest is None or lowest >= _LOW_SELF_SIMILARITY:
        return ()
    return (f"the model finds a text similar to itself by as little as {lowest:.2f}, which should be near 1",)


# Relevance: how much each token of an answer matters (SAR), by a model of similarity; of greedy answers or samples.

# Of each need which answers it is of, and what its statistic is called among those planned.
_OF = {EvidenceNeed.RELEVANCE: ("greedy", "relevance"), EvidenceNeed.SAMPLE_RELEVANCE: ("samples", "sample-relevance")}


# An option of a group.
_models = partial(option, group="models")


@dataclass(frozen=True, kw_only=True)
class RelevanceOptions(CommonOptions):
    """Which model says how much each token matters."""

    relevance_model: str | None = _models(
        None,
        help="model of similarity that says how much each token matters (SAR), such as "
        "cross-encoder/stsb-roberta-large",
        metavar="PATH_OR_ID",
    )
    relevance_kind: EncoderWord | None = _models(
        None, help="how it compares texts (default: as its config says)", choices=get_args(EncoderWord)
    )

    def contradictions(self) -> Iterator[str]:
        """Without a model there is nothing to say of how it compares."""
        yield from super().contradictions()
        if self.relevance_kind is not None and self.relevance_model is None:
            yield "--relevance-kind says how --relevance-model compares; name that"


class Relevance(Statistic[RelevanceOptions]):
    """R of each token, of the greedy answers or of the samples: two statistics of one kind, by one model."""

    kind = "relevance"
    options = RelevanceOptions
    needs = tuple(_OF)

    def plan(self, options: RelevanceOptions, planning: Planning) -> dict[str, StatisticSpec]:
        """The relevance that is needed, of the model that is named."""
        needed = {name: answers for need, (answers, name) in _OF.items() if need in planning.needs}
        if options.relevance_model is None or not needed:
            return {}
        files, settings = similarity_settings(options.relevance_model, options.relevance_kind, options)
        settings |= span_setting(options.span)
        return {
            name: StatisticSpec(self.kind, files.name, files.sha256, {**settings, "answers": answers})
            for name, answers in needed.items()
        }

    def source(self, need: str, options: RelevanceOptions, has: Has, planned: Planned) -> NeedSource | str:
        """The statistic by the model that is named, else the latest one."""
        answers, name = _OF[EvidenceNeed(need)]
        known = has.latest(self.kind, options.span, answers=answers, long_texts=options.long_texts)
        return planned_or_there(planned.get(name), known, "--relevance-model names a model that measures it")

    def by_encoder(self, spec: StatisticSpec) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def cost(self, spec: StatisticSpec, answers: Sequence[Answered]) -> StatisticCost:
        """An answer of n tokens makes n texts of about n tokens."""
        which = spec.settings["answers"]
        lengths = [[len(each.token_ids) for each in _generations(answered, which)] for answered in answers]
        return StatisticCost(tuple(sum(each * each for each in tokens) + 1 for tokens in lengths))

    def job(self, spec: StatisticSpec, inputs: JobInputs) -> BatchMeasurer:
        """By the model of similarity."""
        model, seen = loaded_similarity(inputs)
        which = spec.settings["answers"]
        return BatchMeasurer(lambda batch: measure_relevance(model, batch, which, spec.span), seen)

    def remarks(self, seen: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
        """Whether the model finds a text similar to itself."""
        return self_similarity_remarks(seen)

    def values(self, given: ValueInputs[RelevanceOptions]) -> Values:
        """Of each question a list of numbers for each of its answers."""
        return Values([row["relevance"] for row in given.rows or ()])


RELEVANCE = register(Relevance())


def measure_relevance(model: Similarity, answered: Sequence[Answered], which: str, span: Span) -> list[str]:
    """``relevance``: for the greedy answer (``which`` is greedy) or each sample a list of a number a token."""
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


# Similarity: how alike the samples of a question are, each pair, by a cross-encoder or a bi-encoder.

# Equivalence and affinity can be made of the similarity too.
_NEEDED_BY = frozenset({EvidenceNeed.SIMILARITY, EvidenceNeed.EQUIVALENCE, EvidenceNeed.AFFINITY})


@dataclass(frozen=True, kw_only=True)
class SimilarityOptions(RelevanceOptions):
    """Which model compares the samples; that of the relevance where none is named."""

    similarity_model: str | None = _models(
        None, help="model of the similarity of samples (default: the relevance model)", metavar="PATH_OR_ID"
    )
    similarity_kind: EncoderWord | None = _models(
        None, help="how it compares texts (default: as its config says)", choices=get_args(EncoderWord)
    )
    similarity_without_question: bool = _models(
        False, help="compare the samples alone; else each with the question before it, as SAR does"
    )

    def contradictions(self) -> Iterator[str]:
        """Without a model there is nothing to say of how it compares."""
        yield from super().contradictions()
        if self.similarity_kind is not None and self.similarity_model is None:
            yield "--similarity-kind says how --similarity-model compares; name that"


class SampleSimilarity(Statistic[SimilarityOptions]):
    """g of each pair of samples."""

    kind = "similarity"
    options = SimilarityOptions
    needs = (EvidenceNeed.SIMILARITY,)
    of_samples = True

    def plan(self, options: SimilarityOptions, planning: Planning) -> dict[str, StatisticSpec]:
        """The similarity by the model that is named for it, or for the relevance."""
        own = options.similarity_model is not None
        model = options.similarity_model if own else options.relevance_model
        if model is None or not planning.needs & _NEEDED_BY:
            return {}
        return {"similarity": self.spec(options, model, options.similarity_kind if own else options.relevance_kind)}

    def spec(self, options: SimilarityOptions, model: str, word: EncoderWord | None = None) -> StatisticSpec:
        """The similarity by this model."""
        files, settings = similarity_settings(model, word, options)
        settings |= {"with_question": not options.similarity_without_question, **span_setting(options.span)}
        return StatisticSpec(self.kind, files.name, files.sha256, settings)

    def source(self, need: str, options: SimilarityOptions, has: Has, planned: Planned) -> NeedSource | str:  # noqa: ARG002
        """The statistic by the model that is named, else the latest one."""
        with_question = not options.similarity_without_question
        known = has.latest(self.kind, options.span, with_question=with_question, long_texts=options.long_texts)
        remedy = "--similarity-model (or --relevance-model, for both) names a model that measures it"
        return planned_or_there(planned.get("similarity"), known, remedy)

    def by_encoder(self, spec: StatisticSpec) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def cost(self, spec: StatisticSpec, answers: Sequence[Answered]) -> StatisticCost:  # noqa: ARG002
        """Each sample is read with each other one."""
        return StatisticCost(tuple(tokens_in_pairs(each) for each in answers))

    def job(self, spec: StatisticSpec, inputs: JobInputs) -> BatchMeasurer:
        """By the model of similarity."""
        model, seen = loaded_similarity(inputs)
        question = bool(spec.settings["with_question"])
        return BatchMeasurer(lambda batch: measure_similarity(model, batch, spec.span, question=question), seen)

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
