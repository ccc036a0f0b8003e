"""Equivalence and affinity: which samples mean the same, and how much each follows from each.

Computed from texts alone, from their similarity, or from the relations of each ordered pair of samples (entailment),
which an NLI model or a prompted language model measures. Relations are kept as they are measured: the rules that make
clusters and edges of them can be changed without the model. The wording of the prompt is data, with a digest that goes
into the statistic's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.lm.backend import PromptTokens
from gpuherd.lm.tokens import spellings
from gpuherd.options import option
from gpuherd.qa.encoders.models import Entailment, EntailmentQuery, NliModel, NliRelation
from gpuherd.qa.grading.config import share
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, span_setting, with_closed_thought
from gpuherd.qa.statistics.files import StatisticSpec, line, short
from gpuherd.qa.statistics.language_model import (
    Weigher,
    generator_of,
    load_settings,
    longest_prompt,
    mass_remarks,
    mass_seen,
    one_line,
)
from gpuherd.qa.statistics.registry import (
    BatchMeasurer,
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
    register,
)
from gpuherd.qa.statistics.similarity import (
    SIMILARITY,
    SimilarityOptions,
    encoder_of,
    matrix_in,
    sample_texts,
    tokens_in_pairs,
    why_of_samples,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.qa.runs import Run

EquivalenceWord = Literal["exact", "math", "nli", "judge", "embedding"]
RuleWord = Literal["strict", "not-contradicting"]
AffinityWord = Literal["nli", "similarity", "jaccard"]

BY_TEXT = frozenset({"exact", "math"})  # equivalences that take no model
DEFAULT_THRESHOLD = 0.9

_ENTAILMENT = """\
We are evaluating answers to this question: {question}
Here are two possible answers:
Possible answer 1: {premise}
Possible answer 2: {hypothesis}
Does possible answer 1 semantically entail possible answer 2? Respond with one word: entailment, contradiction, or \
neutral."""
_CUE = "Response:"
ENTAILMENT_SHA256 = hashlib.sha256(f"{_ENTAILMENT}\n{_CUE}".encode()).hexdigest()


# An option of a group.
_models = partial(option, group="models")


@dataclass(frozen=True, kw_only=True)
class EquivalenceOptions(SimilarityOptions):
    """When two samples mean the same, and what the edges of their graph are."""

    equivalence: EquivalenceWord | None = _models(
        None,
        help="when two samples mean the same: equal but for case, punctuation and articles; of one result, numbers by "
        "value; each entails the other by an NLI model, or by a prompted language model; their similarity is at "
        "least a threshold (default: math where most references are numbers, else exact)",
        choices=get_args(EquivalenceWord),
    )
    equivalence_model: str | None = _models(
        None,
        help="the NLI model, such as microsoft/deberta-large-mnli; the language model (default: the one that "
        "answered); the model of similarity (default: the similarity model)",
        metavar="PATH_OR_ID",
    )
    equivalence_rule: RuleWord = _models(
        "strict",
        help="each entails the other, or: neither contradicts and not both are neutral",
        choices=get_args(RuleWord),
    )
    equivalence_threshold: float = _models(
        DEFAULT_THRESHOLD, help="of --equivalence embedding", parse=share, metavar="G"
    )
    condition_on_question: bool = _models(False, help="put the question before both samples for the NLI model")
    affinity: AffinityWord | None = _models(
        None,
        help="edges of the graph of samples: p(entailment), similarity, or shared words (default: p(entailment) where "
        "the equivalence has it, else shared words)",
        choices=get_args(AffinityWord),
    )

    def contradictions(self) -> Iterator[str]:
        """Options of one kind of equivalence where another is chosen."""
        yield from super().contradictions()
        by = self.equivalence
        if self.equivalence_model is not None and by in (None, *BY_TEXT):
            yield "--equivalence-model needs --equivalence nli, judge or embedding"
        if by == "nli" and self.equivalence_model is None:
            yield "--equivalence nli needs --equivalence-model, such as microsoft/deberta-large-mnli"
        if self.equivalence_rule != "strict" and by not in ("nli", "judge"):
            yield "--equivalence-rule is about what entails what; it needs --equivalence nli or judge"
        if self.condition_on_question and by != "nli":
            yield "--condition-on-question is of --equivalence nli; a language model is shown the question always"
        if self.equivalence_threshold != DEFAULT_THRESHOLD and by != "embedding":
            yield "--equivalence-threshold is of --equivalence embedding"


class SampleEntailment(Statistic[EquivalenceOptions]):
    """The relation of each ordered pair of samples; equivalence and affinity are made of it, or of less."""

    kind = "entailment"
    options = EquivalenceOptions
    needs = (EvidenceNeed.EQUIVALENCE, EvidenceNeed.AFFINITY)
    of_samples = True

    def plan(self, options: EquivalenceOptions, planning: Planning) -> dict[str, StatisticSpec]:
        """Entailment by the NLI model or language model, or a similarity by a model of its own."""
        if not planning.needs & set(self.needs):
            return {}
        if options.equivalence == "embedding" and options.equivalence_model is not None:
            return {"equivalence-similarity": SIMILARITY.spec(options, options.equivalence_model)}
        if options.equivalence == "nli":
            return {"entailment": self._by_nli(options, str(options.equivalence_model))}
        if options.equivalence == "judge":
            return {"entailment": self._by_language_model(options, planning.run)}
        return {}

    def _by_nli(self, options: EquivalenceOptions, model: str) -> StatisticSpec:
        from gpuherd.qa.encoders.files import nli_labels

        files = encoder_of(model)
        nli_labels(files.name, files.config)
        settings = {
            "by": "nli",
            "condition_on_question": options.condition_on_question,
            "long_texts": options.long_texts,
            **span_setting(options.span),
        }
        return StatisticSpec(self.kind, files.name, files.sha256, settings)

    def _by_language_model(self, options: EquivalenceOptions, run: Run) -> StatisticSpec:
        """By the model that is named, or the one that answered."""
        if options.equivalence_model is None:
            generator = generator_of(run, options)
            model, sha256, loaded = generator.model, generator.sha256, generator.options
        else:
            from gpuherd.models.load.identity import model_files

            model = options.equivalence_model
            sha256 = model_files(model, options.adapter).sha256
            loaded = options
        settings = {"by": "judge", "prompt_sha256": ENTAILMENT_SHA256, **load_settings(loaded)}
        return StatisticSpec(self.kind, model, sha256, settings | span_setting(options.span))

    def source(self, need: str, options: EquivalenceOptions, has: Has, planned: Planned) -> NeedSource | str:
        """As the options say: texts, similarity, or relations."""
        if need == EvidenceNeed.AFFINITY:
            return self._affinity(options, has, planned)
        if options.equivalence == "math":
            return NeedSource("math: of one result, numbers by value")
        if options.equivalence in (None, "exact"):
            return NeedSource("exact: equal but for case, punctuation and articles")
        if options.equivalence == "embedding":
            met = SIMILARITY.source(EvidenceNeed.SIMILARITY, options, has, planned)
            if (spec := planned.get("equivalence-similarity")) is not None:
                met = NeedSource(spec.name, spec)
            if isinstance(met, str):
                return met
            return NeedSource(f"{met.said}, at least {options.equivalence_threshold}", met.spec)
        spec = planned.get("entailment")
        if spec is None:
            return f"--equivalence {options.equivalence} has no model"
        return NeedSource(f"{spec.name}, {options.equivalence_rule}", spec)

    def _affinity(self, options: EquivalenceOptions, has: Has, planned: Planned) -> NeedSource | str:
        entailment = planned.get("entailment")
        by = options.affinity or ("jaccard" if entailment is None else "nli")
        if by == "jaccard":
            return NeedSource("jaccard: shared words")
        if by == "similarity":
            return SIMILARITY.source(EvidenceNeed.SIMILARITY, options, has, planned)
        if entailment is None:
            return "--affinity nli takes p(entailment) of --equivalence nli or judge"
        return NeedSource(f"{entailment.name}, p(entailment)", entailment)

    def settings(self, options: EquivalenceOptions, sources: Mapping[str, NeedSource]) -> dict[str, Any]:
        """The rule that makes clusters."""
        source = sources.get(EvidenceNeed.EQUIVALENCE)
        if source is None:
            return {}
        rule = rule_of(options, source)
        return {"equivalence": {"by": rule.by, "rule": rule.rule.value, "threshold": rule.threshold}}

    def by_encoder(self, spec: StatisticSpec) -> bool:
        """An NLI model is an encoder."""
        return spec.settings.get("by") == "nli"

    def cost(self, spec: StatisticSpec, answers: Sequence[Answered]) -> StatisticCost:
        """Each sample is read with each other one."""
        tokens = tuple(tokens_in_pairs(each) for each in answers)
        return StatisticCost(tokens) if self.by_encoder(spec) else StatisticCost(tokens, longest_prompt(answers))

    def language_model(
        self, spec: StatisticSpec, options: EquivalenceOptions, run: Run
    ) -> tuple[str, EquivalenceOptions]:
        """The model that is named, else the one that answered."""
        if options.equivalence_model is not None:
            return options.equivalence_model, options
        return super().language_model(spec, options, run)

    def job(self, spec: StatisticSpec, inputs: JobInputs) -> BatchMeasurer:
        """By the NLI model, or by the prompted language model."""
        if self.by_encoder(spec):
            settings = spec.settings
            nli: Entailment = NliModel(
                inputs.encoder(),
                condition_on_question=settings["condition_on_question"],
                cut=settings["long_texts"] == "cut",
                rows=inputs.options.batch_size,
            )
            return BatchMeasurer(lambda batch: measure_entailment(nli, batch, spec.span))
        masses: list[float] = []
        model = PromptedEntailment(Weigher(inputs.language_model(), inputs.options.batch_size), masses)
        return BatchMeasurer(
            lambda batch: measure_entailment(model, batch, spec.span), lambda: mass_seen("the three words", masses)
        )

    def remarks(self, seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Whether the language model would have said something else."""
        return mass_remarks(seen)

    def values(self, given: ValueInputs[EquivalenceOptions]) -> Values:
        """Clusters, or the edges of the graph."""
        rows: Sequence[Row | None] = [None] * len(given.texts) if given.rows is None else given.rows
        pairs = zip(given.texts, rows, strict=True)
        if given.need == EvidenceNeed.EQUIVALENCE:
            rule = rule_of(given.options, given.source)
            return Values([clusters_in(texts, row, rule) for texts, row in pairs])
        return Values([affinity_in(texts, row) for texts, row in pairs])


ENTAILMENT = register(SampleEntailment())


# --- what a job measures --------------------------------------------------------------------------------------------


def measure_entailment(model: Entailment, answered: Sequence[Answered], span: Span) -> list[str]:
    """``texts``: for each sample the place of its text among the different ones; ``relations``: of each ordered pair of
    these p(entailment), p(neutral), p(contradiction); null of a text with itself."""
    texts = [sample_texts(each, span) for each in answered]
    unique = [list(dict.fromkeys(each)) for each in texts]
    queries = [
        EntailmentQuery(each.question.question, premise, hypothesis)
        for each, different in zip(answered, unique, strict=True)
        for premise, hypothesis in permutations(different, 2)
    ]
    found = dict(zip(queries, model.relations(queries), strict=True))
    lines = []
    for each, said, different in zip(answered, texts, unique, strict=True):
        text = each.question.question
        cells = [[found.get(EntailmentQuery(text, one, other)) for other in different] for one in different]
        missing = sum(cell is None for row in cells for cell in row) > len(different)
        why = why_of_samples(said, missing)
        places = [different.index(text) for text in said]
        lines.append(line(each, {"texts": places, "relations": None if why else [*map(_probabilities, cells)]}, why))
    return lines


def _probabilities(row: Sequence[NliRelation | None]) -> list[list[float] | None]:
    cells = [() if each is None else (each.entailment, each.neutral, each.contradiction) for each in row]
    return [[*map(short, each)] or None for each in cells]


class EntailmentPrompts:
    """Prompts that ask whether one answer follows from another, in the tokenizer's chat template where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        from gpuherd.qa.prompts.conversation import control_texts

        self._tokenizer = tokenizer
        self._controls = control_texts(tokenizer)

    def text(self, query: EntailmentQuery) -> str:
        """The prompt without a chat template around it."""
        question, premise, hypothesis = (one_line(text, self._controls) for text in query)
        return _ENTAILMENT.format(question=question, premise=premise, hypothesis=hypothesis)

    def tokens(self, query: EntailmentQuery) -> tuple[int, ...]:
        """The prompt as token ids."""
        from gpuherd.qa.prompts.conversation import templated, token_ids

        text, chat = self.text(query), bool(getattr(self._tokenizer, "chat_template", None))
        # Where the template opens a thought the words would else be weighed in the middle of it.
        conversation = [{"role": "user", "content": text}]
        whole = with_closed_thought(templated(self._tokenizer, conversation)) if chat else f"{text}\n{_CUE}"
        return token_ids(self._tokenizer, whole, conversation=chat)


class PromptedEntailment:
    """Entailment by a language model: a prompt, and the probabilities of three words; nothing is decoded.

    As Farquhar et al. 2024 (Nature 630) ask GPT-4 or LLaMA, but for the reading: the three words' probabilities,
    divided by what they have together.

    Args:
        masses: is given what they have together, for each prompt.
    """

    def __init__(self, weigher: Weigher, masses: list[float]) -> None:
        self._weigher = weigher
        tokenizer = weigher.model.tokenizer
        self._prompt = EntailmentPrompts(tokenizer)
        self._words = [spellings(tokenizer, word) for word in ("entailment", "neutral", "contradiction")]
        self._masses = masses

    def relations(self, queries: Sequence[EntailmentQuery]) -> list[NliRelation | None]:
        """The relation of each, in their order; equal ones are computed once."""
        unique = list(dict.fromkeys(queries))
        prompts = [PromptTokens(str(number), self._prompt.tokens(each)) for number, each in enumerate(unique)]
        weighed = self._weigher.weigh(prompts, self._words)
        found = {each: self._relation(logs) for each, logs in zip(unique, weighed, strict=True)}
        return [found[each] for each in queries]

    def _relation(self, logs: tuple[float | None, ...] | None) -> NliRelation | None:
        if logs is None or all(each is None for each in logs):
            return None
        highest = max(each for each in logs if each is not None)
        parts = [0.0 if each is None else math.exp(each - highest) for each in logs]
        whole = math.fsum(parts)
        self._masses.append(min(1.0, whole * math.exp(highest)))
        entailment, neutral, contradiction = (part / whole for part in parts)
        return NliRelation(entailment, neutral, contradiction)


# --- what measures get ----------------------------------------------------------------------------------------------


class MeaningRule(StrEnum):
    """When two answers mean the same."""

    STRICT = "strict"  # each follows from the other (Kuhn et al. 2023)
    # Neither contradicts, and not both are neutral (Farquhar et al. 2024, code).
    NOT_CONTRADICTING = "not-contradicting"


def mean_the_same(there: NliRelation, back: NliRelation, rule: MeaningRule) -> bool:
    """Whether two answers are one meaning by the relations in both directions."""
    labels = (there.label, back.label)
    if rule is MeaningRule.STRICT:
        return labels == ("entailment", "entailment")
    return "contradiction" not in labels and labels != ("neutral", "neutral")


def clusters(number: int, same: Callable[[int, int], bool]) -> tuple[int, ...]:
    """For each of so many answers the number of its cluster, from 0 in order of first appearance.

    Greedy, as in Kuhn et al. 2023 (arXiv 2302.09664), algorithm 1: an answer joins the first cluster whose first member
    means the same, else it opens one. Each answer is so in exactly one cluster, also where "the same" is not
    transitive.

    >>> clusters(3, lambda a, b: {a, b} != {0, 1})
    (0, 1, 0)
    """
    firsts: list[int] = []
    found: list[int] = []
    for answer in range(number):
        cluster = next((cluster for cluster, first in enumerate(firsts) if same(first, answer)), len(firsts))
        if cluster == len(firsts):
            firsts.append(answer)
        found.append(cluster)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ClusterRule:
    """The rule by which two samples have one meaning.

    Attributes:
        by: ``exact``, ``math``, ``relations`` or ``similarity``.
        rule: when relations do.
        threshold: from which similarity on.
    """

    by: str
    rule: MeaningRule = MeaningRule.STRICT
    threshold: float = DEFAULT_THRESHOLD


def rule_of(options: EquivalenceOptions, source: NeedSource) -> ClusterRule:
    """The rule of a scoring."""
    if source.spec is None:
        by = "math" if options.equivalence == "math" else "exact"
    else:
        by = "relations" if source.spec.kind == ENTAILMENT.kind else "similarity"
    return ClusterRule(by, MeaningRule(options.equivalence_rule), options.equivalence_threshold)


def clusters_in(texts: Sequence[str], row: Row | None, rule: ClusterRule) -> tuple[int, ...] | None:
    """The cluster of each sample; None where there are no samples, or what makes clusters is not measured.

    Args:
        texts: of the samples.
        row: of the statistic that the clusters are made of; None where that is the texts alone.
    """
    same = _same(texts, row, rule) if texts else None
    return None if same is None else clusters(len(texts), same)


def _same(texts: Sequence[str], row: Row | None, rule: ClusterRule) -> Callable[[int, int], bool] | None:
    """Whether the samples of two numbers mean the same; None where that is not measured."""
    if rule.by == "exact":
        from gpuherd.qa.grading.rules import normalised

        plain = [normalised(text) for text in texts]
        return lambda one, other: plain[one] == plain[other]
    if rule.by == "math":
        from gpuherd.qa.grading.formulas import same_results

        return same_results(texts)
    if row is None:
        return None
    if rule.by == "similarity":
        matrix = row["matrix"]
        if matrix is None:
            return None
        return lambda one, other: texts[one] == texts[other] or matrix[one][other] >= rule.threshold
    relations = relation_matrix(row)
    if relations is None:
        return None
    return lambda one, other: (
        texts[one] == texts[other] or mean_the_same(relations[one][other], relations[other][one], rule.rule)
    )


def affinity_in(texts: Sequence[str], row: Row | None) -> NDArray[np.float64] | None:
    """The edges of the graph of the samples; None where there are no samples, or they are not measured.

    Args:
        row: of the statistic whose values they are (p(entailment) or similarity); None: they are shared words.
    """
    import numpy as np

    if not texts:
        return None
    if row is None:
        return np.array([[jaccard(one, other) for other in texts] for one in texts])
    if "relations" not in row:
        return matrix_in(row)
    relations = relation_matrix(row)
    if relations is None:
        return None
    return np.clip([[each.entailment for each in cells] for cells in relations], 0.0, 1.0)


def jaccard(first: str, second: str) -> float:
    """Shared words of all words, in lower case, divided at white space (Lin et al. 2024); 1 for equal texts.

    >>> jaccard("in Paris", "Paris it is")
    0.25
    """
    if first == second:
        return 1.0
    one, other = set(first.lower().split()), set(second.lower().split())
    return len(one & other) / max(1, len(one | other))


def relation_matrix(row: Row) -> list[list[NliRelation]] | None:
    """The relation of each ordered pair of samples; equal texts entail each other. None where one is not known."""
    if row["relations"] is None:
        return None
    places: Sequence[int] = row["texts"]
    table = [
        [NliRelation(1.0, 0.0, 0.0) if each is None else NliRelation(*each) for each in cells]
        for cells in row["relations"]
    ]
    return [[table[one][other] for other in places] for one in places]
