"""What the page's script is told besides the answers: judges, measures, figures, audits; as JSON values. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpuherd.errors import printable
from gpuherd.qa.evaluation.result import (
    ByJudge,
    Difference,
    Evaluation,
    HolmCorrected,
    MeasureResult,
    Point,
)
from gpuherd.qa.intervals import Figure, Interval
from gpuherd.qa.judging.audit import Audit, Disagreement
from gpuherd.qa.judging.label_quality import Agreement
from gpuherd.qa.judging.verdicts import Verdict
from gpuherd.qa.look.chunks import CHUNK, VERDICTS, Chunks
from gpuherd.qa.look.shown import Judged, Shown

MOST_DISAGREEMENTS = 500  # of a judging; the command lists all


def index_values(shown: Shown, chunks: Chunks, scored: int) -> dict[str, Any]:
    """The page's index.

    Args:
        chunks: the answers that the page holds.
        scored: of how many answers, from the first on, it holds scores and verdicts.
    """
    places = {each.meta.name: place for place, each in enumerate(shown.judgings)}
    numbers = {each.question.id: number for number, each in enumerate(shown.answers)}
    found: dict[str, Any] = _printable(
        {
            "answers": len(shown.answers),
            "shown": chunks.answers,
            "scored": scored,
            "chunk": CHUNK,
            "relevance": bool(shown.relevance),
            "judges": [_judge_values(each) for each in shown.judgings],
            "measures": [
                {"name": each.name, "summary": each.summary, "source": each.source, "undefined": dict(each.undefined)}
                for each in shown.scores
            ],
            "evaluation": None if shown.evaluation is None else _evaluation_values(shown.evaluation, places),
            "audits": [_audit_values(audit, places.get(audit.name), numbers) for audit in shown.audits],
        }
    )
    return found


def _printable(value: Any) -> Any:
    """Names and sentences with what can't be seen written out: the script puts them where no element can be."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, (list, tuple)) else value


def _judge_values(judged: Judged) -> dict[str, Any]:
    meta = judged.meta
    about = {
        "kind": meta.kind.value,
        "model": meta.model,
        "threshold": meta.threshold,
        "answers": meta.answers,
        "prompt sha256": meta.prompt_sha256,
        "made": meta.made,
    } | dict(meta.settings)
    return {
        "name": meta.name,
        "judge": meta.judge,
        "counts": [meta.counts.get(verdict, 0) for verdict in VERDICTS],
        "about": [[name, str(value)] for name, value in about.items() if value is not None],
    }


def _evaluation_values(evaluation: Evaluation, places: Mapping[str, int]) -> dict[str, Any]:
    settings = evaluation.settings
    return {
        "name": evaluation.name,
        "against": settings.against,
        "not_attempted": settings.not_attempted,
        "confidence": settings.confidence,
        "bootstrap": settings.bootstrap,
        "calibration": settings.calibration,
        "judges": [_by_judge(each, places) for each in evaluation.judges if each.judging in places],
    }


def _by_judge(found: ByJudge, places: Mapping[str, int]) -> dict[str, Any]:
    differences = {each.name: each for each in found.differences}
    return {
        "judge": places[found.judging],
        "which": found.which,
        "right": found.right,
        "wrong": found.wrong,
        "left_out": found.left_out,
        "counts": [getattr(found.counts, verdict.value) for verdict in VERDICTS],
        "warnings": [each.text for each in found.warnings],
        "measures": [_measure_values(each, differences.get(each.name)) for each in found.measures],
        "prefixes": [
            [each.length, each.answers, each.shorter, _figure(each.nll), _figure(each.mean_nll)]
            for each in found.prefixes
        ],
        "positions": [
            [each.position, each.right_answers, each.wrong_answers, _figure(each.right), _figure(each.wrong)]
            for each in found.positions
        ],
    }


def _measure_values(found: MeasureResult, difference: Difference | None) -> dict[str, Any]:
    histogram = found.histogram
    return {
        "name": found.name,
        "weighting": found.weighting,
        "right": found.right,
        "wrong": found.wrong,
        "conclusive": found.conclusive,
        "undefined": dict(found.undefined),
        "auroc": _figure(found.auroc),
        "closed": _ends(found.auroc_closed_form),
        "auprc": _figure(found.auprc),
        "base": _short(found.base_rate),
        "prr": _figure(found.prr),
        "prr_half": _figure(found.prr_half),
        "aurac": _figure(found.aurac),
        "ece": _figure(found.ece),
        "at": [[each.coverage, _figure(each.accuracy)] for each in found.at],
        "roc": _points(found.roc),
        "rejection": _points(found.rejection),
        "histogram": None
        if histogram is None
        else [[_short(each) for each in histogram.edges], list(histogram.right), list(histogram.wrong)],
        "difference": None
        if difference is None
        else {
            "answers": difference.answers,
            "auroc": _figure(difference.auroc),
            "p": _short(difference.p),
            "among_all": _corrected(difference.among_all),
            "among_measures": _corrected(difference.among_measures),
        },
    }


def _audit_values(audit: Audit, place: int | None, numbers: Mapping[str, int]) -> dict[str, Any]:
    rate = audit.yes_rate
    return {
        "name": audit.name,
        "judge": place,
        "counts": [getattr(audit.counts, verdict.value) for verdict in VERDICTS],
        "yes": [rate.count, rate.of, _short(rate.value), _ends(rate.interval)],
        "warnings": [each.text for each in audit.warnings],
        "agreements": [_agreement_values(each) for each in audit.agreements],
        "disagreements": [
            _disagreement_values(each, numbers)
            for each in audit.disagreements[:MOST_DISAGREEMENTS]
            if each.id in numbers
        ],
        "all_disagreements": len(audit.disagreements),
    }


def _agreement_values(found: Agreement) -> dict[str, Any]:
    return {
        "other": found.other,
        "by_rule": found.by_rule,
        "table": [found.both_correct, found.only_this, found.only_other, found.both_incorrect],
        "left_out": found.left_out,
        "agreed": [_short(found.agreed.value), _ends(found.agreed.interval)],
        "kappa": [_short(found.kappa.value), _ends(found.kappa.interval), found.kappa.reason],
        "p": _short(found.mcnemar_p),
    }


def _disagreement_values(found: Disagreement, numbers: Mapping[str, int]) -> list[Any]:
    others = [[name, _place(verdict)] for name, verdict in found.others]
    return [numbers[found.id], found.which, _place(found.verdict), _short(found.p_correct), others]


def _place(verdict: Verdict) -> int:
    return VERDICTS.index(verdict)


def _corrected(found: HolmCorrected | None) -> dict[str, Any] | None:
    return None if found is None else {"p": _short(found.p), "ends": _ends(found.interval)}


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": _short(figure.value), "ends": _ends(figure.interval), "note": figure.note}


def _ends(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else [_short(interval.low), _short(interval.high)]


def _points(points: Sequence[Point]) -> list[list[float | None]]:
    return [[_short(each.x), _short(each.y)] for each in points]


def _short(value: float | None) -> float | None:
    """Six digits: more than the page shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
