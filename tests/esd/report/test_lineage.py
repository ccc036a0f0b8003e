"""Lineage: the nearest base is what a plain search over all of them finds."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.report import lineage
from gpuherd.esd.report.lineage import LEAST_SHARE, Profile, common_names, kinships


def profile(
    name: str,
    alpha: list[float],
    *,
    source: str | None = None,
    base: bool = True,
    layers: tuple[str, ...] | None = None,
) -> Profile:
    return Profile(name, source, base, layers or tuple(f"{at}.w" for at in range(len(alpha))), np.array(alpha))


def test_the_docstrings_examples() -> None:
    assert doctest.testmod(lineage).failed == 0


def test_a_fine_tune_is_nearest_to_its_base() -> None:
    found = kinships(
        [
            profile("a", [2.0, 3.0, 4.0]),
            profile("b", [5.0, 5.0, 5.0]),
            profile("tuned", [2.01, 3.0, 4.02], source="a", base=False),
        ]
    )[2]
    assert (found.parent, found.contradicts) == (0, False)
    assert found.nearest is not None and found.stated == found.nearest
    assert found.nearest.model == 0
    assert found.nearest.distance == pytest.approx(0.01)
    assert found.nearest.layers == 3


def test_a_wrong_statement_is_contradicted() -> None:
    found = kinships(
        [profile("a", [2.0, 3.0]), profile("b", [5.0, 5.0]), profile("t", [2.0, 3.0], source="b", base=False)]
    )[2]
    assert found.contradicts
    assert found.nearest is not None and found.nearest.model == 0
    assert found.stated is not None and found.stated.distance == pytest.approx(2.5)


def test_of_equally_near_bases_the_stated_one_is_meant() -> None:
    twins = [profile("a", [2.0, 3.0]), profile("b", [2.0, 3.0])]
    found = kinships([*twins, profile("t", [2.1, 3.1], source="b", base=False)])[2]
    assert found.nearest is not None and found.nearest.model == 1
    assert not found.contradicts


def test_a_base_does_not_come_from_its_own_fine_tune() -> None:
    tuned = profile("t", [2.0, 3.0], source="a", base=False)
    adapted = profile("lora", [2.0, 3.0], source="t", base=False)
    found = kinships([profile("a", [2.0, 3.0]), tuned, adapted])
    assert found[0].nearest is None
    assert found[1].nearest is not None and found[1].nearest.model == 0
    assert found[2].parent == 1


def test_a_circle_in_the_list_ends() -> None:
    found = kinships(
        [profile("a", [2.0], source="b"), profile("b", [2.0], source="a"), profile("c", [2.0], source="c")]
    )
    assert [each.parent for each in found] == [1, 0, None]


def test_too_few_layers_in_common_are_no_comparison() -> None:
    ten = [2.0] * 10
    names = tuple(f"{at}.w" for at in range(10))
    enough = profile("base", [3.0] * 9, layers=names[:9])
    less = profile("small", [2.0] * 8, layers=names[:8])
    found = kinships([profile("t", ten, base=False, layers=names), enough, less])[0]
    assert found.nearest is not None and (found.nearest.model, found.nearest.layers) == (1, 9)


def test_layers_without_a_fit_do_not_count() -> None:
    nan = float("nan")
    found = kinships([profile("base", [2.0, nan, 9.0]), profile("t", [2.5, 3.0, nan], source="base", base=False)])[1]
    assert found.stated is None  # one common fit of two
    assert found.parent == 0
    nothing = kinships([profile("base", [2.0]), profile("t", [nan], source="base", base=False)])[1]
    assert nothing.nearest is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["h.0.attn", "h.1.attn", "wte"], ("0.attn", "1.attn", "wte")),
        (["transformer.h.0.attn", "transformer.wte", "lm_head"], ("0.attn", "wte", "lm_head")),
        (["lm_head"], ("lm_head",)),
        (["a.0", "0"], ("a.0", "0")),
        (["a.0", "a.a.0"], ("0", "a.0")),
        ([], ()),
    ],
)
def test_names_without_what_all_layers_share(names: list[str], expected: tuple[str, ...]) -> None:
    assert common_names(names) == expected


@given(st.lists(st.from_regex(r"[ab01]?(\.[ab01]){0,3}", fullmatch=True), unique=True))
def test_shorter_names_stay_different(names: list[str]) -> None:
    assert len(set(common_names(names))) == len(names)


@given(st.integers(0, 10_000), st.integers(2, 7), st.integers(1, 12))
def test_the_nearest_base_is_that_of_a_plain_search(seed: int, models: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    profiles = []
    for number in range(models):
        names = tuple(f"{at}.w" for at in rng.permutation(layers)[: rng.integers(max(1, layers - 1), layers + 1)])
        alpha = rng.uniform(2, 6, len(names))
        alpha[rng.random(len(names)) < 0.1] = np.nan
        profiles.append(Profile(f"m{number}", None, bool(rng.random() < 0.7), names, alpha))
    for number, found in enumerate(kinships(profiles)):
        own = profiles[number]
        best: tuple[float, int] | None = None
        for other, base in enumerate(profiles):
            if other == number or not base.is_base:
                continue
            theirs = dict(zip(base.layers, base.alpha, strict=True))
            shared = [name for name in own.layers if name in theirs]
            away = [abs(a - theirs[n]) for n, a in zip(own.layers, own.alpha, strict=True) if n in theirs]
            away = [each for each in away if not np.isnan(each)]
            fits = int(np.isfinite(own.alpha).sum())
            if len(shared) < LEAST_SHARE * len(own.layers) or not away or len(away) < LEAST_SHARE * fits:
                continue
            if best is None or float(np.median(away)) < best[0]:
                best = float(np.median(away)), other
        assert (best is None) == (found.nearest is None)
        if best is not None and found.nearest is not None:
            assert found.nearest.distance == pytest.approx(best[0], abs=1e-12)
            assert found.nearest.model == best[1]


@pytest.mark.parametrize(
    ("stated", "other", "verdict"),
    [
        (0.01, 1.0, "as stated"),
        (0.003, 0.001, "as stated"),  # two copies of one base, or a fine-tune of a fine-tune
        (0.6, 0.9, "stated, far"),
        (0.8, 0.7, "unclear"),  # of two strangers one is always a little nearer
        (0.8, 0.4, "other"),
        (0.8, 0.002, "other"),
    ],
)
def test_a_base_is_doubted_only_where_another_is_clearly_nearer(stated: float, other: float, verdict: str) -> None:
    tuned = profile("t", [3.0, 3.0], source="a", base=False)
    found = kinships([profile("a", [3.0 + stated] * 2), profile("b", [3.0 - other] * 2), tuned])[2]
    assert found.verdict == verdict
    assert found.contradicts == (verdict == "other")


def test_without_a_statement_the_nearest_is_close_or_not() -> None:
    found = kinships([profile("a", [3.0, 3.0]), profile("b", [3.01, 3.0]), profile("c", [5.0, 5.0])])
    assert [each.verdict for each in found] == ["close", "close", "far"]
    assert kinships([profile("a", [3.0, 3.0])])[0].verdict is None


def test_a_stated_base_of_other_layers_is_doubted_where_another_is_close() -> None:
    tuned = profile("t", [3.0, 3.0], source="a", base=False)
    elsewhere = Profile("a", None, True, ("x.0", "x.1"), np.array([3.0, 3.0]))
    assert kinships([elsewhere, profile("b", [3.001, 3.0]), tuned])[2].verdict == "other"
    assert kinships([elsewhere, profile("b", [9.0, 9.0]), tuned])[2].verdict == "far"


@pytest.mark.parametrize("seed", range(3))
def test_of_many_bases_the_index_finds_what_all_distances_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verdict and every stated or close base is that of a search through all; only strangers may be others."""
    rng = np.random.default_rng(seed)
    profiles: list[Profile] = []
    for number in range(150):
        names = tuple(f"{at}.w" for at in range(rng.integers(18, 24)))
        alpha = rng.uniform(2, 6, len(names))
        source = None
        if profiles and rng.random() < 0.6:
            parent = profiles[rng.integers(len(profiles))]
            names, alpha = parent.layers, parent.alpha + rng.normal(0, 0.003, len(parent.layers))
            source = (parent.model_id, f"m{rng.integers(150)}", None)[rng.integers(3)]
        alpha = np.where(rng.random(len(alpha)) < 0.03, np.nan, alpha)
        profiles.append(Profile(f"m{number}", source, source is None, names, alpha))
    quick = kinships(profiles)
    monkeypatch.setattr(lineage, "FEW", 10**6)
    whole = kinships(profiles)
    assert [each.verdict for each in quick] == [each.verdict for each in whole]
    assert [each.stated for each in quick] == [each.stated for each in whole]
    close = [(a.nearest, b.nearest) for a, b in zip(quick, whole, strict=True) if b.verdict not in (None, "far")]
    assert len(close) > 50
    assert all(a == b for a, b in close)
