"""What can be asked of a scoring: which measures, by which conventions and models. Light: declarations and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.jobs.run_dir import safe_name
from gpuherd.models.load.job_options import WorkOptions
from gpuherd.options import option
from gpuherd.qa.folder import RunsOptions
from gpuherd.qa.span import SPANS, Span
from gpuherd.units import count

Eos = Literal["include", "exclude"]
EncoderWord = Literal["cross-encoder", "bi-encoder"]
Equivalence = Literal["exact", "math", "nli", "judge", "embedding"]
RuleWord = Literal["strict", "not-contradicting"]
Affinity = Literal["nli", "similarity", "jaccard"]
PTrueForm = Literal["true", "letter"]
LongTexts = Literal["refuse", "cut"]

BY_TEXT = frozenset({"exact", "math"})  # equivalences that take no model
ALL, LOG_PROBS = "all", "log-probs"
DEFAULT_THRESHOLD = 0.9


def share(word: str) -> float:
    """A number from 0 to 1."""
    value = float(word)
    if not 0 <= value <= 1:
        raise ValueError(f"{word!r} is not from 0 to 1")
    return value


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(RunsOptions, WorkOptions):
    """A scoring of one run."""

    measures: tuple[str, ...] = option(
        (),
        help="exact names, or the beginning of several (weighted-nll); log-probs: what needs nothing but the answers; "
        "all (default: what the answers, the models named here and earlier scorings allow)",
        many=True,
        metavar="M",
        group="measures",
    )
    name: str | None = option(
        None, help="name of the scoring (default: 8 hex digits of all it depends on)", metavar="NAME", group="measures"
    )
    eos: Eos = option(
        "include",
        help="whether the token that ended an answer counts among its tokens",
        choices=get_args(Eos),
        group="measures",
    )
    span: Span = option(
        "answer",
        help="which part of what a reasoning model wrote is measured, texts and tokens alike: the answer behind its "
        "thought, the thought, or both; without thoughts these are the same",
        choices=SPANS,
        group="measures",
    )
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
    equivalence: Equivalence | None = option(
        None,
        help="when two samples mean the same: equal but for case, punctuation and articles; of one result, numbers by "
        "value; each entails the other by an NLI model, or by a language model that is asked; their similarity is at "
        "least a threshold (default: math where most references are numbers, else exact)",
        choices=get_args(Equivalence),
        group="models",
    )
    equivalence_model: str | None = option(
        None,
        help="the NLI model, such as microsoft/deberta-large-mnli; the language model (default: the one that "
        "answered); the model of similarity (default: the similarity model)",
        metavar="PATH_OR_ID",
        group="models",
    )
    equivalence_rule: RuleWord = option(
        "strict",
        help="each entails the other, or: neither contradicts and not both are neutral",
        choices=get_args(RuleWord),
        group="models",
    )
    equivalence_threshold: float = option(
        DEFAULT_THRESHOLD, help="of --equivalence embedding", parse=share, metavar="G", group="models"
    )
    condition_on_question: bool = option(
        False, help="put the question before both samples for the NLI model", group="models"
    )
    affinity: Affinity | None = option(
        None,
        help="edges of the graph of samples: p(entailment), similarity, or shared words (default: p(entailment) where "
        "the equivalence has it, else shared words)",
        choices=get_args(Affinity),
        group="models",
    )
    long_texts: LongTexts = option(
        "refuse",
        help="texts too long for an encoder: their scores are undefined, or computed of the beginnings",
        choices=get_args(LongTexts),
        group="models",
    )
    p_true: PTrueForm = option(
        "true",
        help="what is asked for P(True): the word True (LM-Polygraph), or the letter A (jlko)",
        choices=get_args(PTrueForm),
        group="self-evaluation",
    )
    p_true_ideas: bool = option(
        False, help="show the samples as brainstormed ideas before the answer is asked about", group="self-evaluation"
    )
    p_true_examples: int = option(
        0,
        help="put so many of the run's questions with their labels before it; these get no P(True); needs --judge",
        parse=count,
        metavar="K",
        group="self-evaluation",
    )
    judge: str | None = option(
        None,
        help="judging whose labels train the probe of p-ik and stand in the examples of P(True)",
        metavar="J",
        group="self-evaluation",
    )
    seed: int = option(
        0, help="of the folds of p-ik and the choice of examples", parse=count, metavar="N", group="self-evaluation"
    )

    def __post_init__(self) -> None:
        WorkOptions.__post_init__(self)
        object.__setattr__(self, "measures", tuple(self.measures))
        for wrong, sentence in (
            (
                self.relevance_kind is not None and self.relevance_model is None,
                "--relevance-kind says how --relevance-model compares; name that",
            ),
            (
                self.similarity_kind is not None and self.similarity_model is None,
                "--similarity-kind says how --similarity-model compares; name that",
            ),
            (
                self.equivalence_model is not None and self.equivalence in (None, *BY_TEXT),
                "--equivalence-model needs --equivalence nli, judge or embedding",
            ),
            (
                self.equivalence == "nli" and self.equivalence_model is None,
                "--equivalence nli needs --equivalence-model, such as microsoft/deberta-large-mnli",
            ),
            (
                self.equivalence_rule != "strict" and self.equivalence not in ("nli", "judge"),
                "--equivalence-rule is about what entails what; it needs --equivalence nli or judge",
            ),
            (
                self.condition_on_question and self.equivalence != "nli",
                "--condition-on-question is of --equivalence nli; a language model is shown the question always",
            ),
            (
                self.equivalence_threshold != DEFAULT_THRESHOLD and self.equivalence != "embedding",
                "--equivalence-threshold is of --equivalence embedding",
            ),
            (
                self.p_true_examples > 0 and self.judge is None,
                "--p-true-examples shows labelled answers; --judge names the judging that has the labels",
            ),
        ):
            if wrong:
                raise UsageError(sentence)
        if self.name is not None and safe_name(self.name) != self.name:
            raise UsageError(
                f"--name {self.name!r}: a scoring's name has letters, digits and . _ + = @ - in it, at most 120, and "
                "begins with none of . and -"
            )
