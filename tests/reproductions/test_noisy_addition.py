"""The control's base, and the comparison itself, small and whole."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from reproductions.comparison import GUIDED, Budget, methods
from reproductions.noisy_addition.__main__ import run_seed
from reproductions.noisy_addition.base import FURTHEST, mislabelled, sums
from reproductions.noisy_addition.protocol import METHODS, Looked, Phase, Protocol, chosen_base
from reproductions.results import own, read_results
from reproductions.star_graph.protocol import METHODS as STAR_METHODS
from rich.console import Console

from gpuherd.posttrain.types import Split


def test_labels_are_wrong_as_often_as_asked_and_never_right_by_chance() -> None:
    problems = sums(Protocol(), 0).problems(Split.TRAIN, 4_000, 0)
    drawing = random.Random(0)
    labelled = [mislabelled(each, 0.5, drawing) for each in problems]
    wrong = [other for one, other in zip(problems, labelled, strict=True) if one.answers != other.answers]
    assert 0.47 < len(wrong) / len(problems) < 0.53
    pairs = [(int(one.answers[0]), int(other.answers[0])) for one, other in zip(problems, labelled, strict=True)]
    assert max(abs(one - other) for one, other in pairs) == FURTHEST and min(other for _, other in pairs) >= 0
    assert all(mislabelled(each, 1.0, drawing).answers != each.answers for each in problems)


def test_the_base_is_the_first_that_is_right_half_of_the_time() -> None:
    looked = [Looked(step, 1.0, right, 0.0) for step, right in ((10, 0.9), (20, 0.54), (30, 0.5))]
    chosen = chosen_base(looked)
    assert chosen is not None and chosen.step == 20
    assert chosen_base(looked[:1]) is None


def test_all_methods_of_both_comparisons_are_there() -> None:
    known = set(methods(Budget(steps=2, sequences=16, max_new_tokens=4)))
    assert set(METHODS) == known and set(STAR_METHODS) == known - {"PPO"} and set(GUIDED) < known


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path) -> None:
    """Every method from one base: few steps, so nothing is said of how good they are; and nothing is done twice."""
    protocol = replace(
        Protocol(),
        budget=Budget(steps=3, sequences=16, max_new_tokens=4),
        problems=40,
        phases=(Phase(300, 3e-3),),
        look_every=5,
        test=30,
        heldout=20,
    )
    places = {"work": tmp_path / "work", "results": tmp_path / "results"}
    args = Namespace(methods=METHODS, rate_factor=1.0, **places)
    # So little is learnt from 40 sums that no base would count; it counts as soon as it is looked at.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reproductions.noisy_addition.protocol.HALF_WITHIN", 0.6)
        run_seed(protocol, 0, args, Console())
        (found,) = read_results(tmp_path / "results")
        assert [*found["methods"]] == [*METHODS]
        for name, method in found["methods"].items():
            assert own(method["points"])["problems"] == 30
            assert len(method["points"]) == (5 if name in GUIDED else 1)
        (tmp_path / "results" / "seed0.json").unlink()
        run_seed(protocol, 0, args, Console())
    assert read_results(tmp_path / "results") == [found]
