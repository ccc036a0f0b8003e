"""P(IK): a probe that never sees the label of the question it speaks of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gpuherd.qa.statistics.self_evaluation import _fitted, probe


def some_states(
    labels: list[bool | None], seed: int = 0, *, signal: float = 2.0
) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    draw = np.random.default_rng(seed)
    states = draw.normal(size=(len(labels), 8))
    states[:, 0] += [signal * bool(label) for label in labels]
    return list(states.astype(np.float32))


LABELS: list[bool | None] = [number % 3 != 0 for number in range(60)]


def test_a_signal_is_found_out_of_fold() -> None:
    found = probe(some_states(LABELS, signal=4.0), LABELS, 0)
    assert found.remarks == ()
    right = [value for value, label in zip(found.column, LABELS, strict=True) if label and value is not None]
    wrong = [value for value, label in zip(found.column, LABELS, strict=True) if not label and value is not None]
    assert len(right) + len(wrong) == 60 and all(0 <= value <= 1 for value in right + wrong)
    assert np.mean(right) > np.mean(wrong) + 0.5


def test_no_value_comes_from_its_own_label() -> None:
    # Each question has a dimension of its own, which says nothing of the others: a probe that did not see it has no
    # weight for it, so that all questions of a fold get one value. One that saw it would be right about all of them.
    found = probe(list(np.eye(60, dtype=np.float32)), LABELS, 0)
    values = [value for value in found.column if value is not None]
    assert len(values) == 60 and len({round(value, 9) for value in values}) <= 5
    # The folds have the classes in equal parts, so that nor does the base rate of the others tell anything.
    right = [value for value, label in zip(values, LABELS, strict=True) if label]
    assert np.mean(right) == pytest.approx(np.mean(values), abs=1e-3)


def test_a_question_without_a_state_has_no_value_and_trains_nothing() -> None:
    states = some_states(LABELS)
    found = probe([*states, None, None], [*LABELS, True, None], 0)
    assert found.column == [*probe(states, LABELS, 0).column, None, None]


def test_the_seed_decides_the_folds_and_nothing_else_does() -> None:
    states = some_states(LABELS)
    assert probe(states, LABELS, 1) == probe(states, LABELS, 1) != probe(states, LABELS, 2)


def test_questions_without_a_label_train_nothing_and_get_a_value() -> None:
    labels: list[bool | None] = [*LABELS, None, None]
    states = some_states(labels)
    found = probe(states, labels, 0)
    assert found.column[:60] == probe(states[:60], LABELS, 0).column
    assert all(value is not None for value in found.column[60:])


@pytest.mark.parametrize("labels", [[True] * 8, [False] * 8, [True] * 7 + [False], [None] * 8, []])
def test_one_class_makes_no_probe(labels: Sequence[bool | None]) -> None:
    found = probe([np.zeros(3, dtype=np.float32) for _ in labels], labels, 0)
    assert found.column == [None] * len(labels)
    assert "2 of each" in found.remarks[0]


def test_few_of_a_class_make_fewer_folds() -> None:
    labels: list[bool | None] = [*[True] * 10, *[False] * 2]
    assert None not in probe(some_states(labels), labels, 0).column


@pytest.mark.parametrize("width", [8, 300])
def test_the_probe_is_fitted_to_its_optimum(width: int) -> None:
    """Against the optimum in all dimensions, by a Newton iteration of our own."""
    draw = np.random.default_rng(5)
    states = (draw.normal(size=(60, width)) * draw.lognormal(0, 2, width)).astype(np.float32)
    right = np.array(LABELS, dtype=bool)
    train, test = np.arange(48), np.arange(48, 60)
    found = _fitted(states, train, right[train], test)
    known = states[train].astype(np.float64)
    mean, scale = known.mean(axis=0), known.std(axis=0)
    rows = np.column_stack([(known - mean) / scale, np.ones(48)])
    penalty = np.diag([1.0] * width + [0.0])
    weights = np.zeros(width + 1)
    for _ in range(100):
        p = 1 / (1 + np.exp(-rows @ weights))
        gradient = rows.T @ (p - right[train]) + penalty @ weights
        weights -= np.linalg.solve(rows.T @ (rows * (p * (1 - p))[:, None]) + penalty, gradient)
    assert np.abs(gradient).max() < 1e-10
    asked = np.column_stack([(states[test].astype(np.float64) - mean) / scale, np.ones(12)])
    assert found == pytest.approx((1 / (1 + np.exp(-asked @ weights))).tolist(), abs=1e-7)
