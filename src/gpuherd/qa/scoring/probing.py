"""P(IK): does the model know the answer? A linear probe of its hidden state behind the prompt, cross-validated.

Kadavath et al. 2022 (arXiv 2207.05221), section 5, as jlko/semantic_uncertainty does it: a logistic regression on the
state of the prompt's last token. There the probe is trained on another split; here on the other folds of the same run,
so that no question's probability comes from a probe that saw its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.errors import naming_extras

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDS = 5
_TOLERANCE = 1e-9  # of the gradient, an answer's mean


@dataclass(frozen=True, slots=True)
class Probed:
    """P(IK) of each question, in [0, 1]; None for all, with the reason, where no probe can be trained."""

    values: tuple[float | None, ...]
    why: str | None = None


def probe(states: Sequence[NDArray[np.float32] | None], labels: Sequence[bool | None], seed: int) -> Probed:
    """Probabilities out of fold.

    Args:
        states: (d,) of each question; None where there is none, and so no probability.
        labels: whether the main answer was right; None where there is no label. Such a question trains nothing, and is
            given the probability of a probe of all labelled ones.
        seed: of the folds.

    There are 5 folds, fewer where a class has fewer members; with fewer than 2 of a class there is no probe. States are
    standardised by the training folds; the regression has an L2 penalty of 1 (C = 1) and is fitted to convergence.
    """
    import numpy as np

    there = [number for number, state in enumerate(states) if state is not None]
    known = np.array([number for number in there if labels[number] is not None], dtype=int)
    others = np.array([number for number in there if labels[number] is None], dtype=int)
    right = np.array([labels[number] for number in known], dtype=bool)
    fewest = int(min(right.sum(), (~right).sum()))
    if fewest < 2:
        return Probed(
            (None,) * len(labels),
            f"{right.sum()} right and {(~right).sum()} wrong answers have a label; a probe takes 2 of each at least",
        )
    with naming_extras({"sklearn": "qa", "sklearn.linear_model": "qa"}, "the probe of p-ik takes"):
        from sklearn.model_selection import StratifiedKFold
    table = np.stack([np.zeros_like(states[there[0]]) if state is None else state for state in states])
    found: list[float | None] = [None] * len(labels)
    folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=seed)
    parts = [(known[train], right[train], known[test]) for train, test in folds.split(np.zeros((len(known), 1)), right)]
    for train, labelled, test in [*parts, *([(known, right, others)] if len(others) else [])]:
        for number, value in zip(test, _fitted(table, train, labelled, test), strict=True):
            found[number] = value
    return Probed(tuple(found))


def _fitted(
    states: NDArray[np.float32], train: NDArray[np.int_], right: NDArray[np.bool_], test: NDArray[np.int_]
) -> list[float]:
    """P(right) of the questions ``test`` by a probe of the questions ``train``."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    known = scaler.fit_transform(states[train].astype("float64"))
    # The penalised weights lie in the span of the training states: there the problem has as many unknowns as questions
    # at most, and Newton's method, which ends at the optimum itself, is affordable whatever the model's width.
    axes = np.linalg.svd(known, full_matrices=False)[2].T
    model = LogisticRegression(solver="newton-cholesky", tol=_TOLERANCE, max_iter=1000)
    model.fit(known @ axes, right)
    column = list(model.classes_).index(True)
    asked = scaler.transform(states[test].astype("float64")) @ axes
    return [float(value) for value in model.predict_proba(asked)[:, column]]
