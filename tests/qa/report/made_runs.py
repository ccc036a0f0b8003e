"""Runs of answers made for the tests of the page: as many as wanted, with all that can be known of them."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.qa.grading.judgings import some_meta

from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.evaluation.result import (
    AtCoverage,
    AtPosition,
    AurocDifference,
    ByJudge,
    CurvePoint,
    EvaluateSettings,
    Histogram,
    HolmCorrected,
    MeasureResult,
    PrefixAuroc,
    RunEvaluation,
)
from gpuherd.qa.folder import FORMAT, KIND, QADirectory
from gpuherd.qa.grading.audit import Audit, audit
from gpuherd.qa.grading.files import JudgeKind
from gpuherd.qa.grading.label_quality import JudgeVerdicts as Labelled
from gpuherd.qa.grading.label_quality import LabelWarning, VerdictCounts
from gpuherd.qa.grading.label_quality import WarningKind as Doubt
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.intervals import Figure, Interval, auroc_interval
from gpuherd.qa.record import Answered, Prompted, Question, line_of
from gpuherd.qa.report.reading import Judged, MeasureScores, ReportedRun

WORDS = (
    "the",
    "river",
    "Danube",
    "flows",
    "through",
    "ten",
    "countries",
    "ends",
    "in",
    "Black",
    "Sea",
    "Paris",
    "1944",
)


def generation(pieces: Sequence[str], log_probs: Sequence[float | None], finish: Finish = Finish.EOS) -> Generation:
    """An answer of these pieces."""
    ends: list[int] = []
    for piece in pieces:
        ends.append((ends[-1] if ends else 0) + len(piece))
    end = (2, -0.01) if finish is Finish.EOS else (None, None)
    return Generation(tuple(range(len(pieces))), tuple(log_probs), "".join(pieces), tuple(ends), finish, *end)


def answered(number: int, draw: random.Random, *, samples: int = 5, words: int | None = None) -> Answered:
    """An answer of a few words, some of them certain, others not."""

    def one() -> Generation:
        count = words if words is not None else draw.randint(1, 24)
        pieces = [(" " if at else "") + draw.choice(WORDS) for at in range(count)]
        return generation(pieces, [-(draw.expovariate(1.2) ** 2) for _ in pieces])

    question = Question(
        f"q{number}",
        f"Question {number}: where does {draw.choice(WORDS)} lead to, and who said {draw.choice(WORDS)}?",
        (draw.choice(WORDS), f"{draw.choice(WORDS)} {draw.choice(WORDS)}"),
        "A context. " * draw.randint(1, 20) if number % 3 == 0 else None,
    )
    return Answered(number, question, Prompted("0" * 64, 120), one(), tuple(one() for _ in range(samples)))


def put_run(root: Path, answers: Sequence[Answered]) -> QADirectory:
    """Writes a complete run of these answers."""
    folder = QADirectory(root)
    root.mkdir(parents=True)
    data = "".join(line_of(each) + "\n" for each in answers).encode()
    folder.answers.write_bytes(data)
    config = {"model": "org/tiny", "dataset": "trivia_qa"}
    record = {"format": FORMAT, "kind": KIND, "run_id": root.name, "config": config, "identity": {"temperature": 1.0}}
    done = {
        "format": FORMAT,
        "answers_sha256": hashlib.sha256(data).hexdigest(),
        "answers_bytes": len(data),
        "questions": len(answers),
    }
    folder.run_json.write_text(json.dumps(record))
    folder.done.write_text(json.dumps(done))
    return folder


def made_run(
    count: int, *, seed: int = 0, samples: int = 5, words: int | None = None, measures: int = 6, weightings: int = 42
) -> ReportedRun:
    """A run with two judgings, scores, relevance, clusters and an evaluation whose figures come from simple sums."""
    draw = random.Random(seed)
    answers = [answered(number, draw, samples=samples, words=words) for number in range(count)]
    nll = [-math.fsum(each or 0.0 for each in one.main.log_probs) for one in answers]
    wrong = [draw.random() < 1 / (1 + math.exp(1.5 - value / 12)) for value in nll]
    verdicts = [Verdict.INCORRECT if each else Verdict.CORRECT for each in wrong]
    for number in range(5, count, 50):
        verdicts[number] = Verdict.NOT_ATTEMPTED
    for number in range(7, count, 90):
        verdicts[number] = Verdict.UNPARSED
    names = ["nll", "ln-nll", "token-sar", "semantic-entropy:rao", "u-eigv", "p-true"][:measures]
    names += [f"weighted-nll:scheme-{number}" for number in range(weightings)]
    scores = [
        MeasureScores(name, [value / (place + 1) + draw.gauss(0, place) for value in nll], "a paper, eq. 1")
        for place, name in enumerate(names)
    ]
    if measures > 3:
        holes = [None if number % 17 == 0 else value for number, value in enumerate(scores[3].values)]
        scores[3] = replace(scores[3], values=holes, undefined={"no samples": holes.count(None)})
    judgings = (
        _judging("llm_some-judge-01234567", JudgeKind.MODEL, answers, verdicts, draw),
        _judging("exact-89abcdef", JudgeKind.EXACT, answers, _flipped(verdicts, draw), draw),
    )
    return ReportedRun(
        title="tiny-trivia_qa-1a2b3c4d",
        facts=(("answers", f"{count:,}"), ("model", "org/tiny"), ("data set", "trivia_qa validation")),
        settings=(("temperature", "1.0"), ("max_new_tokens", "64"), ("dtype", "float32")),
        answers=answers,
        judgings=judgings,
        scores=scores,
        relevance={one.question.id: [draw.random() ** 2 for _ in one.main.token_ids] for one in answers},
        clusters={one.question.id: [draw.randint(0, 2) for _ in one.samples] for one in answers} if samples else {},
        audits=made_audits(judgings),
        evaluation=made_evaluation(scores, verdicts, judgings),
    )


def _judging(
    name: str, kind: JudgeKind, answers: Sequence[Answered], verdicts: Sequence[Verdict], draw: random.Random
) -> Judged:
    judgments = {}
    for one, verdict in zip(answers, verdicts, strict=True):
        sure = draw.uniform(0.6, 1.0)
        p = sure if verdict is Verdict.CORRECT else 1 - sure
        by_model = kind is JudgeKind.MODEL
        judgments[(one.question.id, "greedy")] = Judgment(
            one.question.id,
            "greedy",
            verdict,
            p_correct=p if by_model else None,
            mass=0.98 if by_model else None,
            reply=f"The answer is {verdict.value}." if by_model and one.number % 4 == 0 else None,
            note="no verdict in the reply" if verdict is Verdict.UNPARSED else None,
        )
    counts = {verdict: list(verdicts).count(verdict) for verdict in Verdict}
    meta = some_meta(name, kind=kind, counts=counts, model="org/judge" if kind is JudgeKind.MODEL else None)
    return Judged(meta, judgments)


def made_audits(judgings: Sequence[Judged]) -> list[Audit]:
    """Each judging against the others."""
    labelled = [Labelled(each.meta.name, each.meta.kind.value, list(each.judgments.values())) for each in judgings]
    return [audit(each, [other for other in labelled if other is not each]) for each in labelled]


def _flipped(verdicts: Sequence[Verdict], draw: random.Random) -> list[Verdict]:
    other = {Verdict.CORRECT: Verdict.INCORRECT, Verdict.INCORRECT: Verdict.CORRECT}
    return [other.get(each, Verdict.INCORRECT) if draw.random() < 0.15 else each for each in verdicts]


def made_evaluation(
    scores: Sequence[MeasureScores], verdicts: Sequence[Verdict], judgings: Sequence[Judged]
) -> RunEvaluation:
    """An evaluation whose AUROCs, curves and histograms are those of the scores; the other figures follow from them."""
    labels = [each is Verdict.INCORRECT for each in verdicts]
    labelled = [each in (Verdict.CORRECT, Verdict.INCORRECT) for each in verdicts]
    results = tuple(_measure(each, labels, labelled) for each in scores)
    first = results[0].auroc.value or 0.5
    corrected = HolmCorrected(0.4, Interval(-0.05, 0.05))
    differences = tuple(
        AurocDifference(
            *(each.name, each.scored, _figure((each.auroc.value or 0.5) - first, 0.05), 0.03, 0.4, corrected),
            None if each.weighting is not None else HolmCorrected(0.06, Interval(-0.02, 0.02)),
        )
        for each in results[1:]
    )
    counts = VerdictCounts(**{verdict.value: list(verdicts).count(verdict) for verdict in Verdict})
    judges = [
        ByJudge(
            judging=judged.meta.name,
            judge=judged.meta.judge,
            which="greedy",
            counts=counts,
            right=counts.correct,
            wrong=counts.incorrect,
            left_out=counts.not_attempted + counts.unparsed,
            warnings=(LabelWarning(next(iter(Doubt)), f"{judged.meta.name} is doubtful <b>indeed</b>."),),
            measures=results,
            differences=differences,
            prefixes=tuple(
                PrefixAuroc(
                    length, 100, 10 * length, _figure(0.5 + length / 40, 0.06), _figure(0.5 + length / 50, 0.05)
                )
                for length in (1, 3, 5, 10)
            ),
            positions=tuple(
                AtPosition(at, 60 - at, 40 - at, _figure(0.5 + at / 60, 0.1), _figure(1.2 + at / 50, 0.02 * at + 0.1))
                for at in range(30)
            ),
        )
        for judged in judgings
    ]
    return RunEvaluation(
        "abcdef01", "tiny-trivia_qa-1a2b3c4d", "12345678", "include", "0" * 64, EvaluateSettings(), tuple(judges)
    )


def _figure(value: float, reach: float) -> Figure:
    return Figure(value, Interval(value - reach, value + reach))


def _measure(scores: MeasureScores, wrong: Sequence[bool], labelled: Sequence[bool]) -> MeasureResult:
    pairs = [
        (value, bad)
        for value, bad, known in zip(scores.values, wrong, labelled, strict=True)
        if known and value is not None
    ]
    pairs.sort(key=lambda each: -each[0])
    bad = sum(each for _, each in pairs)
    good = len(pairs) - bad
    roc, rejection = [CurvePoint(0.0, 0.0)], []
    area, seen_bad, seen_good = 0.0, 0, 0
    for _, each in pairs:
        seen_bad += each
        seen_good += not each
        area += 0 if each else seen_bad
        roc.append(CurvePoint(seen_good / max(1, good), seen_bad / max(1, bad)))
    missed = 0
    for kept, (_, each) in enumerate(reversed(pairs), start=1):
        missed += each
        if kept >= len(pairs) // 20:
            rejection.append(CurvePoint(kept / len(pairs), 1 - missed / kept))
    auroc = area / (good * bad) if good and bad else None
    values = sorted(value for value, _ in pairs) or [0.0]
    edges = tuple(values[0] + (values[-1] - values[0]) * at / 20 for at in range(21))
    width = (values[-1] - values[0]) / 20 or 1.0
    counts = [[0] * 20, [0] * 20]
    for value, each in pairs:
        counts[each][min(19, int((value - values[0]) / width))] += 1
    none = Figure(None, note="one class only")
    return MeasureResult(
        name=scores.name,
        right=good,
        wrong=bad,
        undefined=scores.undefined,
        auroc=none if auroc is None else Figure(auroc, auroc_interval(auroc, bad, good)),
        auroc_closed_form=None if auroc is None else auroc_interval(auroc, bad, good),
        auprc=none if auroc is None else _figure(auroc * 0.8, 0.04),
        base_rate=bad / len(pairs) if pairs else None,
        prr=none if auroc is None else _figure(2 * auroc - 1, 0.08),
        prr_half=none if auroc is None else _figure(2 * auroc - 1.02, 0.08),
        aurac=none if auroc is None else _figure(0.5 + auroc / 3, 0.03),
        ece=none if auroc is None else _figure(0.04, 0.02),
        at=(AtCoverage(0.8, _figure(0.7, 0.04)),),
        roc=() if auroc is None else (*roc[:: max(1, len(roc) // 150)], CurvePoint(1.0, 1.0)),
        rejection=() if auroc is None else tuple(rejection[:: max(1, len(rejection) // 150)]),
        histogram=Histogram(edges, tuple(counts[0]), tuple(counts[1])),
    )
