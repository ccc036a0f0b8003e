"""Small singular values that a Gram matrix loses: found to rounding of the largest, or LAPACK is asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.esd_ill_conditioned import beyond_tolerance, many, of_spectrum, rank, spectra, unknown
from scipy.linalg import svdvals

from gpuherd.esd import eigenvalues
from gpuherd.esd.spectra import eigenvalues as module
from gpuherd.esd.spectra import graded
from gpuherd.esd.spectra.graded import graded_singular_values, smallest_singular_values, triangle
from gpuherd.esd.spectra.gram import piece_will_lose_values, will_lose_values

Float64 = npt.NDArray[np.float64]

SIDE = 520  # just above the size from which these ways are taken
TOLERANCE = 1e-12  # of the largest singular value

# No gap, a gap, noise. All of them, and many seeds, are slow.
KINDS = ("14 decades", "two groups", "a third of the rank")


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_right_to_rounding_of_the_largest(kind: str) -> None:
    sigma = spectra(SIDE)[kind]
    found = np.sqrt(eigenvalues(of_spectrum(sigma, np.random.default_rng(1))))
    assert beyond_tolerance(found, np.sort(sigma)) <= 1
    assert rank(found) == rank(sigma)


@pytest.mark.slow
def test_two_hundred_matrices_of_known_spectrum() -> None:
    told = many(seeds=12, n=600)
    assert told["matrices"] >= 200
    assert told["error_over_allowed"] <= 1
    assert told["wrong_ranks"] == 0


@pytest.mark.parametrize(
    ("kind", "shape"), [("heavy rows", "square"), ("rows there twice", "wide"), ("Student's t", "tall")]
)
def test_the_same_as_by_singular_values(kind: str, shape: str) -> None:
    W = unknown(SIDE, np.random.default_rng(3))[kind]
    if shape != "square":
        W = np.concatenate([W, W[:, ::-1]], axis=1)
        W = W if shape == "wide" else W.T
    expected = svdvals(W)[::-1]
    found = np.sqrt(eigenvalues(W))
    assert beyond_tolerance(found, expected) <= 1
    assert rank(found) == rank(expected)


def test_lapack_is_asked_only_where_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    by_lapack = module._ascending_svdvals

    def noted(R: Float64) -> Float64:
        asked.append(len(R))
        return by_lapack(R)

    monkeypatch.setattr(module, "_ascending_svdvals", noted)
    for kind in ("one small value", "three groups", "equal values before a slope"):
        sigma = spectra(SIDE)[kind]
        found = np.sqrt(eigenvalues(of_spectrum(sigma, np.random.default_rng(2))))
        assert beyond_tolerance(found, np.sort(sigma)) <= 1
    assert not asked
    monkeypatch.setattr(graded, "LARGEST_MISFIT", -1.0)
    eigenvalues(of_spectrum(spectra(SIDE)["k^-3"], np.random.default_rng(2)))
    assert asked == [SIDE]


def test_a_wrong_small_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal large values before a slope undo the grading: the check says so, where the error is 1e4 times rounding."""
    sigma = spectra(SIDE)["equal values before a slope"]
    R = triangle(np.asfortranarray(of_spectrum(sigma, np.random.default_rng(2)).T))
    found = graded_singular_values(R)  # the lost ones from the small rows
    assert found is not None and beyond_tolerance(found, np.sort(sigma)) <= 1
    monkeypatch.setattr(graded, "_peeled", lambda *_: None)
    assert graded_singular_values(R) is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k^-3", True), ("14 decades", True), ("low rank and noise", True), ("well-conditioned", False)],
)
def test_matrices_that_will_lose_values_are_known_beforehand(kind: str, expected: bool) -> None:
    W = of_spectrum(spectra(SIDE)[kind], np.random.default_rng(4))
    gram = np.asfortranarray(np.tril(W @ W.T))
    before = gram.copy()
    assert will_lose_values(gram) is expected
    np.testing.assert_array_equal(gram, before)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k^-3", True), ("14 decades", True), ("low rank and noise", True), ("well-conditioned", False), ("k^-1", False)],
)
def test_the_first_piece_tells_before_there_is_a_gram_matrix(kind: str, expected: bool) -> None:
    sigma = spectra(SIDE).get(kind, 1 / np.arange(1, SIDE + 1))
    W = of_spectrum(sigma, np.random.default_rng(4))
    for scale in (1e180, 1e-180):
        assert piece_will_lose_values(scale * W[:400]) is expected


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_not_foreseen_but_counted(weight: float) -> None:
    W = of_spectrum(spectra(SIDE)["k^-3"], np.random.default_rng(6))
    W[0, 0] = weight
    assert not piece_will_lose_values(W[:400])
    for entry in ((0, 0), (1, 1), (SIDE - 1, 3)):  # some are in the sample
        bad = W.copy()
        bad[0, 0], bad[entry] = 1.0, weight
        with pytest.raises(ValueError, match="1 entries"):
            eigenvalues(bad)


def test_half_of_the_rank_is_seen_in_the_gram_matrix() -> None:
    W = of_spectrum(spectra(SIDE)["two groups"], np.random.default_rng(7))
    assert not piece_will_lose_values(W)
    assert will_lose_values(np.asfortranarray(W @ W.T))


def test_random_square_matrices_are_not_taken_for_ill_conditioned() -> None:
    for seed in range(5):
        W = np.random.default_rng(seed).standard_normal((SIDE, SIDE))
        assert not will_lose_values(np.asfortranarray(W @ W.T))
        assert not piece_will_lose_values(W)


def test_a_row_of_zeros_and_a_singular_triangle() -> None:
    W = np.random.default_rng(0).standard_normal((SIDE, SIDE))
    W[7] = 0.0
    W[100] = W[50]
    found = np.sqrt(eigenvalues(W))
    expected = svdvals(W)[::-1]
    assert beyond_tolerance(found, expected) <= 1
    assert rank(found) == SIDE - 2
    R = triangle(np.asfortranarray(W.T))
    small = smallest_singular_values(R, 2, triangular=True)
    assert small is not None and small.max() < TOLERANCE * expected[-1]


def test_weights_far_from_one() -> None:
    W = 1e180 * of_spectrum(spectra(SIDE)["14 decades"], np.random.default_rng(5))
    with np.errstate(over="ignore"):
        found = eigenvalues(W * 2.0**-120)
    np.testing.assert_allclose(np.sqrt(found) / np.sqrt(found[-1]), np.logspace(-14, 0, SIDE), rtol=0, atol=TOLERANCE)
