"""How reliable the labels of a judging are: agreement with other judgings, and warnings with their figures.

Counts by verdict, the two-by-two table of labels, agreement and Cohen's kappa.

Pure. Labels are only ``correct`` and ``incorrect``; the other verdicts are counted and take no part in agreement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.intervals import (
    CONFIDENCE,
    FEWEST_OF_A_CLASS,
    Interval,
    Kappa,
    Share,
    cohen_kappa,
    hanley_mcneil,
    mcnemar_p,
    z_of,
)

RULES = frozenset({"exact", "contains", "squad", "rouge", "math"})  # judges that compare letters or numbers
LABELS = frozenset({Verdict.CORRECT, Verdict.INCORRECT})


@dataclass(frozen=True, slots=True)
class JudgeVerdicts:
    """A judging: its name, the kind of judge (exact, contains, squad, rouge, math, model, url), and its verdicts."""

    name: str
    kind: str
    judgments: Sequence[Judgment]

    @property
    def by_rule(self) -> bool:
        """Whether no model decided."""
        return self.kind in RULES


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """Answers by verdict."""

    correct: int = 0
    incorrect: int = 0
    not_attempted: int = 0
    unparsed: int = 0
    nan: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.correct + self.incorrect + self.not_attempted + self.unparsed + self.nan

    @property
    def labelled(self) -> int:
        """The number of correct and incorrect ones."""
        return self.correct + self.incorrect


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a judging with another, over the answers that both call correct or incorrect.

    Attributes:
        other: the other's name.
        by_rule: whether the other compares letters or numbers.
        both_correct, only_this, only_other, both_incorrect: the two-by-two table.
        left_out: answers that both have judged, but not both with a label.
        agreed: the share on which they agree.
        kappa: that, corrected for chance.
        mcnemar_p: exact p of equal yes-rates; None where they part nowhere.
    """

    other: str
    by_rule: bool
    both_correct: int
    only_this: int
    only_other: int
    both_incorrect: int
    left_out: int
    agreed: Share
    kappa: Kappa
    mcnemar_p: float | None

    @property
    def labelled(self) -> int:
        """Answers in the table."""
        return self.both_correct + self.only_this + self.only_other + self.both_incorrect

    @property
    def rates(self) -> tuple[float, float] | None:
        """The yes-rates of this and of the other over these answers."""
        n = self.labelled
        return None if n == 0 else ((self.both_correct + self.only_this) / n, (self.both_correct + self.only_other) / n)


def count(judgments: Sequence[Judgment]) -> VerdictCounts:
    """How many there are of each verdict."""
    found = Counter(each.verdict for each in judgments)
    return VerdictCounts(**{verdict.value: found[verdict] for verdict in Verdict})


def verdicts_of(judged: JudgeVerdicts) -> dict[tuple[str, str], Verdict]:
    """Verdicts by answer, (id, which)."""
    return {(each.id, each.which): each.verdict for each in judged.judgments}


def agreement(judged: JudgeVerdicts, other: JudgeVerdicts, confidence: float = CONFIDENCE) -> Agreement:
    """The two over the answers that both have judged; each (id, which) counts once."""
    theirs = verdicts_of(other)
    pairs = [(verdict, theirs[key]) for key, verdict in verdicts_of(judged).items() if key in theirs]
    table = Counter(pair for pair in pairs if LABELS.issuperset(pair))
    cells = [table[(mine, said)] for mine in (Verdict.CORRECT, Verdict.INCORRECT) for said in (mine, _not(mine))]
    both_correct, only_this, both_incorrect, only_other = cells
    return Agreement(
        other=other.name,
        by_rule=other.by_rule,
        both_correct=both_correct,
        only_this=only_this,
        only_other=only_other,
        both_incorrect=both_incorrect,
        left_out=len(pairs) - table.total(),
        agreed=Share(both_correct + both_incorrect, table.total(), confidence),
        kappa=cohen_kappa(both_correct, only_this, only_other, both_incorrect, confidence, (judged.name, other.name)),
        mcnemar_p=mcnemar_p(only_this, only_other),
    )


def _not(verdict: Verdict) -> Verdict:
    return Verdict.INCORRECT if verdict is Verdict.CORRECT else Verdict.CORRECT


# --- Warnings ---------------------------------------------------------------------------------------------------------
#
# What makes the labels of a judging doubtful, as sentences with their figures. Pure.
#
# Every rule here has a case behind it: a judge that called 392 of 400 answers correct where it had called 5 so the
# day before; conclusions from 8 wrong answers; verdicts that were read from a reply's quotation of the question.

MOST_UNPARSED = 0.05
MOST_NOT_ATTEMPTED = 0.2
EXTREME_RATE = 0.95  # and its counterpart below
FAR_FROM_RULES = 0.2  # of an extreme yes-rate from the nearest rule's
LEAST_KAPPA = 0.2  # "slight" agreement ends there (Landis & Koch 1977)
FLIPPED_RATE, FLIPPED_P = 0.1, 0.001  # two judgings whose yes-rates are not of one kind
SAME_PROBABILITY = 0.02  # a judge whose probabilities lie within this says the same of every answer
FEWEST_OTHERS = 2  # judges and rules that must agree before one can differ from the rest
ENOUGH_TO_TELL = 20  # answers below which nothing is said of a judge: whatever it does can be chance


class WarningKind(StrEnum):
    """The subject of a warning, the gravest first: a judge that does not look at the answers spoils all that follows;
    what was merely left out comes last."""

    NOTHING = "nothing judged"
    SAYS_ONE_THING = "always the same"
    INVERTED = "inverted"
    CHANCE_AGREEMENT = "no better than chance"
    EXTREME_RATE = "extreme yes-rate"
    APART = "apart from all others"
    ONE_CLASS = "one class"
    FEW_OF_A_CLASS = "few of a class"
    FLIPPED = "flipped"
    NAN = "NaN"
    UNPARSED = "unparsed"
    NOT_ATTEMPTED = "not attempted"


OF_CLASSES = frozenset({WarningKind.ONE_CLASS, WarningKind.FEW_OF_A_CLASS})


@dataclass(frozen=True, slots=True)
class LabelWarning:
    """Something that makes the labels doubtful, as a sentence."""

    kind: WarningKind
    text: str


def label_warnings(
    judged: JudgeVerdicts,
    counts: VerdictCounts,
    agreements: Sequence[Agreement],
    others: Sequence[JudgeVerdicts],
    confidence: float,
) -> list[LabelWarning]:
    """The warnings of a judging, the gravest first, from its counts and its agreements with ``others``: rules and other
    judges."""
    if counts.total == 0:
        return [LabelWarning(WarningKind.NOTHING, f"{judged.name} has judged no answer.")]
    rules = [each for each in agreements if each.by_rule and each.labelled]
    return [
        *_one_thing(judged, counts),
        *(_extreme_rate(judged, rules) or _apart(judged, agreements)),
        *_against_rules(judged, rules),
        *_flips(judged, agreements, others),
        *class_warnings(counts.correct, counts.incorrect, counts.total, confidence),
        *_without_label(judged, counts),
    ]


def _one_thing(judged: JudgeVerdicts, counts: VerdictCounts) -> list[LabelWarning]:
    n = counts.labelled
    if n < ENOUGH_TO_TELL or judged.by_rule:
        return []
    if counts.correct in (0, n):
        word = Verdict.CORRECT if counts.correct else Verdict.INCORRECT
        text = f"{judged.name} calls all {n} answers {word}: it may not look at them. Read some of its replies."
        return [LabelWarning(WarningKind.SAYS_ONE_THING, text)]
    p = [each.p_correct for each in judged.judgments if each.p_correct is not None]
    if len(p) >= ENOUGH_TO_TELL and max(p) - min(p) < SAME_PROBABILITY:
        text = (
            f"{judged.name} gives every answer nearly the same probability, {min(p):.3f} to {max(p):.3f}: its verdicts "
            "hardly depend on the answers."
        )
        return [LabelWarning(WarningKind.SAYS_ONE_THING, text)]
    return []


def _extreme_rate(judged: JudgeVerdicts, rules: Sequence[Agreement]) -> list[LabelWarning]:
    """A yes-rate near 0 or 1 that no rule comes near."""
    rates = [(each.other, *each.rates) for each in rules if each.rates is not None and each.labelled >= ENOUGH_TO_TELL]
    if not rates or judged.by_rule:
        return []
    nearest, mine, theirs = min(rates, key=lambda each: abs(each[1] - each[2]))
    if 1 - EXTREME_RATE < mine < EXTREME_RATE or abs(mine - theirs) <= FAR_FROM_RULES:
        return []
    return [
        LabelWarning(
            WarningKind.EXTREME_RATE,
            f"{judged.name} calls {mine:.1%} correct; the rule that is nearest to it, {nearest}, {theirs:.1%}.",
        )
    ]


def _against_rules(judged: JudgeVerdicts, rules: Sequence[Agreement]) -> list[LabelWarning]:
    """Agreement with the best rule that is no better than chance's, or worse."""
    known = [
        (each, each.kappa.value, each.kappa.interval)
        for each in rules
        if each.labelled >= ENOUGH_TO_TELL and each.kappa.value is not None and each.kappa.interval is not None
    ]
    if not known or judged.by_rule:
        return []
    best, kappa, interval = max(known, key=lambda each: each[1])
    figures = f"kappa {kappa:.2f} ({_format_interval(interval)}) over {best.labelled} answers"
    if interval.high < 0:
        text = f"{judged.name} says the contrary of {best.other}: {figures}. Are its verdict words swapped?"
        return [LabelWarning(WarningKind.INVERTED, text)]
    if kappa < LEAST_KAPPA and interval.low <= 0:
        text = f"{judged.name} agrees with no rule better than chance would; best with {best.other}, {figures}."
        return [LabelWarning(WarningKind.CHANCE_AGREEMENT, text)]
    return []


def _apart(judged: JudgeVerdicts, agreements: Sequence[Agreement]) -> list[LabelWarning]:
    """A yes-rate far from that of every other judge and rule on the same answers, which are nearer to one another."""
    known = [(each, *each.rates) for each in agreements if each.rates is not None and each.labelled >= ENOUGH_TO_TELL]
    if judged.by_rule or len(known) < FEWEST_OTHERS:
        return []
    nearest, mine, theirs = min(known, key=lambda each: abs(each[1] - each[2]))
    # Each pair has answers of its own without a label; what is compared are differences on the same answers.
    apart = [rate - other for _, rate, other in known]
    one_side = all(each > 0 for each in apart) or all(each < 0 for each in apart)
    spread = max(apart) - min(apart)
    chance = nearest.mcnemar_p is None or nearest.mcnemar_p >= FLIPPED_P
    if chance or not one_side or abs(mine - theirs) <= max(FAR_FROM_RULES, spread):
        return []
    others = ", ".join(each.other for each, _, _ in known)
    kappa = "none" if nearest.kappa.value is None else f"{nearest.kappa.value:.2f}"
    return [
        LabelWarning(
            WarningKind.APART,
            f"{judged.name} differs from all the rest ({others}): it calls {mine:.1%} correct, the nearest of them, "
            f"{nearest.other}, {theirs:.1%} of the same {nearest.labelled} answers; {nearest.only_this} are correct by "
            f"it alone, {nearest.only_other} by {nearest.other} alone, kappa {kappa}. Read these disagreements.",
        )
    ]


def _flips(
    judged: JudgeVerdicts, agreements: Sequence[Agreement], others: Sequence[JudgeVerdicts]
) -> list[LabelWarning]:
    """Warnings of other judges that apply another standard. The sentence is the same in the audits of both, and names
    the one that differs from the rest."""
    warned = []
    judges = {each.name: each for each in others if not each.by_rule}
    for each in agreements:
        other = judges.get(each.other)
        if judged.by_rule or other is None or each.rates is None or each.mcnemar_p is None:
            continue
        mine, theirs = each.rates
        if abs(mine - theirs) <= FLIPPED_RATE or each.mcnemar_p >= FLIPPED_P:
            continue
        rest = [third for third in others if third.name != other.name]
        (first, rate, alone), (second, other_rate, other_alone) = sorted(
            ((judged, mine, each.only_this), (other, theirs, each.only_other)), key=lambda side: side[0].name
        )
        text = (
            f"{first.name} and {second.name} are two standards: {rate:.1%} and {other_rate:.1%} correct of the same "
            f"{each.labelled} answers, {alone} correct by the one alone and {other_alone} by the other; "
            f"{_which_differs(first, second, rest)}."
        )
        warned.append(LabelWarning(WarningKind.FLIPPED, text))
    return warned


def _which_differs(first: JudgeVerdicts, second: JudgeVerdicts, rest: Sequence[JudgeVerdicts]) -> str:
    """Which of two judges agrees less with the rest, by the median of the shares of answers on which they agree."""
    one, other = _median_agreement(first, rest), _median_agreement(second, rest)
    if one is None or other is None:
        return "there is no third judge to tell which of them differs"
    if abs(one - other) <= FLIPPED_RATE / 2:
        return f"the rest agree with either alike ({one:.1%} and {other:.1%} of answers)"
    odd = first if one < other else second
    return (
        f"{odd.name} is the one that differs from the rest, which agree with it on {min(one, other):.1%} of answers, "
        f"with the other on {max(one, other):.1%}"
    )


def _median_agreement(judged: JudgeVerdicts, rest: Sequence[JudgeVerdicts]) -> float | None:
    agreements = (agreement(judged, each) for each in rest)
    shares = [
        each.agreed.value for each in agreements if each.agreed.value is not None and each.labelled >= ENOUGH_TO_TELL
    ]
    return median(shares) if shares else None


def class_warnings(right: int, wrong: int, total: int, confidence: float) -> list[LabelWarning]:
    """Whether so many right and wrong ones, of all answers, can carry a conclusion; at most one warning, of a kind in
    ``OF_CLASSES``."""
    n, fewer = right + wrong, min(right, wrong)
    if n == 0:
        return [
            LabelWarning(WarningKind.ONE_CLASS, f"none of {total} answers has a label: no measure can be evaluated.")
        ]
    word = "wrong" if wrong <= right else "right"
    if fewer == 0:
        return [LabelWarning(WarningKind.ONE_CLASS, f"no {word} answer among {n}: there is no AUROC.")]
    if fewer >= FEWEST_OF_A_CLASS:
        return []
    reach = z_of(confidence) * hanley_mcneil(0.5, wrong, right)
    text = (
        f"only {fewer} {word} among {n} answers: the {100 * confidence:.6g}% interval of an AUROC reaches about "
        f"{reach:.2f} to each side, and nothing can be concluded from it."
    )
    return [LabelWarning(WarningKind.FEW_OF_A_CLASS, text)]


def _without_label(judged: JudgeVerdicts, counts: VerdictCounts) -> list[LabelWarning]:
    warned = []
    if counts.nan:
        text = f"{counts.nan} of {counts.total} answers are NaN, which no judge is asked about: they have no label."
        warned.append(LabelWarning(WarningKind.NAN, text))
    for kind, number, most, why, then in (
        (
            WarningKind.UNPARSED,
            counts.unparsed,
            MOST_UNPARSED,
            "gave no verdict that can be read on",
            "they are left out",
        ),
        (
            WarningKind.NOT_ATTEMPTED,
            counts.not_attempted,
            MOST_NOT_ATTEMPTED,
            "calls not attempted",
            "figures depend on whether they are left out or count as wrong (evaluate --not-attempted)",
        ),
    ):
        if number > most * counts.total:
            text = f"{judged.name} {why} {number} of {counts.total} answers ({number / counts.total:.1%}); {then}."
            warned.append(LabelWarning(kind, text))
    return warned


def _format_interval(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"
