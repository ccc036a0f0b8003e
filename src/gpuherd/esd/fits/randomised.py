"""What a spectrum would be if its matrix held the same weights in random order.

All entries of a matrix change places at random, which destroys whatever it has learnt but keeps the distribution of
its weights; the spectrum of the result is that of noise. What stands out even then comes from single large weights
(correlation traps), not from structure. After WeightWatcher (0.7.7, ``apply_random_esd``).

Knows matrices, their spectrum and the Marchenko-Pastur fit. The order is drawn from the seed and the matrix's name,
so that a row doesn't depend on which matrices came before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.config import FitSettings
from gpuherd.esd.fits.marchenko_pastur import fit_marchenko_pastur
from gpuherd.esd.fits.power_law import generator
from gpuherd.esd.schema import RandomisedFigures
from gpuherd.esd.spectra.pooled import layer_spectrum

# --- Random orders ----------------------------------------------------------------------------------------------------
#
# A random order of many numbers, every order equally likely, at the speed of the cache.
#
# The usual shuffle (Fisher and Yates) swaps each number with one anywhere before it: beyond the size of the cache
# nearly every swap waits for memory. Here each number first goes to one of up to 256 heaps, chosen at random, and
# then each heap, which fits the cache, is shuffled by itself. All orders are as likely as before (Rao 1961, Sandelius
# 1962).
#
# Knows arrays and random numbers.

Numbers = npt.NDArray[Any]

# Numbers that a heap should hold: their order takes 512 KB.
HEAP = 1 << 16
MOST_HEAPS = 256
# Numbers that are dealt to the heaps at a time.
DEALT = 1 << 17


def shuffled(W: Numbers, rng: np.random.Generator, *, heap: int = HEAP) -> Numbers:
    """An array of the shape and type of ``W`` with its entries in random order. ``W`` is left as it is.

    Memory: the result, one byte for each entry, and some MB; once more the result where ``W`` is not contiguous.

    Args:
        W: any shape and type.
        rng: the same state gives the same order, on any machine with the same numpy.
        heap: how many numbers a heap should hold.
    """
    entries = W.reshape(-1)
    heaps = 1 << max(0, min(MOST_HEAPS, W.size // heap).bit_length() - 1)
    if heaps == 1:
        return _shuffled_heap(entries, rng).reshape(W.shape)
    order = np.empty_like(entries)
    ends = _deal(entries, _heap_of_each(W.size, heaps, rng), heaps, order)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        order[start:end] = _shuffled_heap(order[start:end], rng)
    return order.reshape(W.shape)


def _shuffled_heap(heap: Numbers, rng: np.random.Generator) -> Numbers:
    """A copy in random order: all its entries drawn without replacement, for which numpy shuffles whole numbers in half
    of the time that its ``shuffle`` takes for float32, and gathers once."""
    return heap.take(rng.choice(len(heap), len(heap), replace=False))


def _heap_of_each(size: int, heaps: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A heap for each of ``size`` entries, all equally likely. ``heaps`` is a power of two: some bits of a byte."""
    heap_of = np.empty(size, np.uint8)
    for start in range(0, size, DEALT):
        part = heap_of[start : start + DEALT]
        np.bitwise_and(np.frombuffer(rng.bytes(len(part)), np.uint8), heaps - 1, out=part)
    return heap_of


def _deal(entries: Numbers, heap_of: npt.NDArray[np.uint8], heaps: int, order: Numbers) -> list[int]:
    """Puts each entry into its heap. The heaps lie one after the other in ``order``; returns where each ends."""
    chunks = range(0, len(entries), DEALT)
    counts = np.array([np.bincount(heap_of[start : start + DEALT], minlength=heaps) for start in chunks])
    ends = counts.sum(axis=0).cumsum()
    # Where the part of a chunk goes: behind the heaps before, and behind the parts of the chunks before.
    starts = (ends - counts.sum(axis=0)) + counts.cumsum(axis=0) - counts
    for chunk, start in enumerate(chunks):
        by_heap = entries[start : start + DEALT].take(heap_of[start : start + DEALT].argsort(kind="stable"))
        taken = 0
        for to, count in zip(starts[chunk].tolist(), counts[chunk].tolist(), strict=True):
            order[to : to + count] = by_heap[taken : taken + count]
            taken += count
    return [int(end) for end in ends]


# --- The comparison ---------------------------------------------------------------------------------------------------

Float64 = npt.NDArray[np.float64]
Matrix = npt.NDArray[Any]

# A spectrum of fewer eigenvalues than this is compared with more than one random order, as in WeightWatcher.
FEW_EIGENVALUES = 100
REPLICAS_OF_FEW = 5

# What the random numbers are for (see ``power_law.generator``).
PURPOSE = "random order"


def compare_with_random_order(
    name: str,
    slices: Sequence[Matrix],
    evals: Float64,
    settings: FitSettings,
    *,
    conv: bool = False,
    device: str = "cpu",
) -> RandomisedFigures:
    """Shuffles a matrix and compares the spectra.

    Args:
        name: of the matrix; with the seed it decides the order.
        slices: the matrix, or the slices of a convolution, each of which is shuffled by itself; finite, not all zero.
            Read, never changed: each shuffled copy is as large as the slice in memory.
        evals: the pooled spectrum of ``slices``, ascending.
        settings: seed, and precision of the eigenvalues.
        conv: as for ``layer_spectrum``.
        device: where the eigenvalues are computed.
    """
    replicas = REPLICAS_OF_FEW if len(evals) < FEW_EIGENVALUES else 1
    rng = generator(PURPOSE, settings.seed, name)
    spectra = [
        layer_spectrum(
            [shuffled(each, rng) for each in slices],
            device=device,
            conv=conv,
            precision=settings.precision,
            resolve=False,  # no figure here is a rank
        )
        for _ in range(replicas)
    ]
    problem = next((each.problem for each in spectra if each.problem is not None), None)
    if problem is not None:
        return RandomisedFigures(rand_status=f"in random order: {problem}")
    return _compared(evals, [each.evals for each in spectra], slices[0].shape)


def _compared(evals: Float64, spectra: Sequence[Float64], shape: tuple[int, ...]) -> RandomisedFigures:
    replicas, largest = len(spectra), float(evals[-1])
    fit = fit_marchenko_pastur(np.sort(np.concatenate(spectra)), *shape)
    return RandomisedFigures(
        max_rand_eval=max(float(each[-1]) for each in spectra),
        rand_softrank=math.fsum(float(each[-1]) / largest for each in spectra) / replicas,
        rand_distance=math.fsum(jensen_shannon_distance(evals, each) for each in spectra) / replicas,
        rand_sigma_mp=fit.sigma_mp,
        rand_bulk_min=fit.bulk_min,
        rand_bulk_max=fit.bulk_max,
        rand_num_spikes=fit.num_spikes,
        rand_mp_softrank=fit.mp_softrank,
        rand_status=fit.mp_status,
    )


def jensen_shannon_distance(p: Float64, q: Float64) -> float:
    """sqrt((KL(p|m) + KL(q|m)) / 2) with m = (p + q) / 2, for p and q divided by their sums; natural logarithm.

    Args:
        p, q: of one length, not negative, with positive and finite sums.
    """
    p, q = p / p.sum(), q / q.sum()
    m = (p + q) / 2
    divergence = (_divergence(p, m) + _divergence(q, m)) / 2
    return math.sqrt(max(divergence, 0.0))  # of two equal spectra, rounding can leave it below 0


def _divergence(p: Float64, m: Float64) -> float:
    """Kullback-Leibler divergence of p from m; where p is 0, or so small that its half is, it adds 0."""
    counted = (p > 0) & (m > 0)
    return float((p[counted] * np.log(p[counted] / m[counted])).sum())
