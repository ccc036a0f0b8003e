"""Where in an answer the uncertainty is: AUROC from the first tokens alone, and NLL by position of right and wrong
answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuherd.qa.bootstrap import Floats
from gpuherd.qa.evaluation.measuring import Labels, auroc_figure
from gpuherd.qa.evaluation.result import AtPosition, Prefix, Settings
from gpuherd.qa.intervals import Figure, Interval
from gpuherd.qa.measures.evidence import Answer
from gpuherd.qa.measures.positions import places, prefix

MOST_POSITIONS = 512  # beyond that hardly any answer has a token, and no page shows it


def prefixes(answers: Sequence[Answer | None], wrong: Labels, settings: Settings) -> tuple[Prefix, ...]:
    """AUROC of the NLL of the first tokens, for each length of ``settings.prefixes``.

    Args:
        answers: of each question, with all log-probs known; None for one that has not. Those without tokens are left
            out too.
        wrong: of each question whether its answer is wrong; None: no label.
    """
    chosen, labels = _with_tokens(answers, wrong)
    found = []
    for length in settings.prefixes:
        part = prefix(chosen, length)
        mean = np.array(part.nll, dtype=np.float64)
        tokens = np.array([min(len(answer.log_probs), length) for answer in chosen])
        found.append(
            Prefix(
                length,
                len(chosen),
                part.shorter,
                nll=auroc_figure(mean * tokens, labels, settings),
                mean_nll=auroc_figure(mean, labels, settings),
            )
        )
    return tuple(found)


def positions(answers: Sequence[Answer | None], wrong: Labels, settings: Settings) -> tuple[AtPosition, ...]:
    """Mean NLL at each position, of right and of wrong answers apart; as far as two answers of any class reach."""
    chosen, labels = _with_tokens(answers, wrong)
    if not chosen:
        return ()
    table = places(chosen, MOST_POSITIONS)
    found = []
    for at in range(table.nll.shape[1]):
        there = table.there[:, at]
        right, wrongs = (table.nll[there & (labels == label), at] for label in (False, True))
        if right.size + wrongs.size < 2:
            break
        found.append(
            AtPosition(
                at,
                right.size,
                wrongs.size,
                mean_figure(right, settings.confidence),
                mean_figure(wrongs, settings.confidence),
            )
        )
    return tuple(found)


def mean_figure(values: Floats, confidence: float) -> Figure:
    """The mean with Student's interval; no interval of fewer than two values, nothing of none."""
    if values.size == 0:
        return Figure(None, note="no answer is that long")
    mean = float(values.mean())
    if values.size == 1:
        return Figure(mean, note="one answer has no interval")
    from scipy.special import stdtrit

    reach = float(stdtrit(values.size - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(values.size))
    return Figure(mean, Interval(mean - reach, mean + reach))


def _with_tokens(answers: Sequence[Answer | None], wrong: Labels) -> tuple[list[Answer], np.ndarray]:
    pairs = [
        (answer, label)
        for answer, label in zip(answers, wrong, strict=True)
        if answer is not None and answer.log_probs and label is not None
    ]
    return [answer for answer, _ in pairs], np.array([label for _, label in pairs], dtype=bool)
