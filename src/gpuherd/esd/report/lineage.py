"""Which model comes from which: by what the list says, and by which base's alphas are nearest. Pure.

A fine-tune hardly moves the spectra of its base: over 392 published pairs the median over layers of |Δalpha| is 0.0028,
against 0.755 for another base with the same layers, and in 95 % of the comparisons a model's own base is the nearest.
So the nearest base by that distance is a strong hint, and is reported where it is not the one that was stated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# A base is compared with a model only if it has a fit for so many of the model's fitted layers.
LEAST_SHARE = 0.9
# So near that one probably comes from the other: between what fine-tunes (0.0028) and strangers (0.755) typically have.
CLOSE = 0.05
# Another base speaks against the stated one only if it is at most so many times as far: of many strangers one always
# happens to be a little nearer than the others, and of two copies of one base either may be.
CLEARLY = 0.5
Verdict = Literal["as stated", "stated, far", "other", "unclear", "close", "far"]
# Of so many bases with a model's layers all distances are computed; of more, those of so many with the nearest
# signatures, and of all that are close.
FEW, CHECKED = 64, 32
_SIGNATURE = 16
_BLOCK = 4_000_000  # numbers at once: 32 MB


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What lineage needs of a model: its name, what it is said to come from, and its alphas by layer.

    ``layers`` are names that the same layer has in every model (see ``common_names``); ``alpha`` is NaN without a fit.
    """

    model_id: str
    source: str | None
    is_base: bool
    layers: tuple[str, ...]
    alpha: Floats


@dataclass(frozen=True, slots=True)
class Near:
    """Another model, by its index, and how far it is: the median over the ``layers`` common layers of |Δalpha|."""

    model: int
    distance: float
    layers: int


@dataclass(frozen=True, slots=True)
class Kinship:
    """Where a model comes from.

    Attributes:
        stated: what it is said to come from, where that is in the run and can be compared.
        nearest: the nearest base of all; None where no base has LEAST_SHARE of its layers.
        parent: index of the stated model, also where it can't be compared; None where it is not in the run.
    """

    parent: int | None
    stated: Near | None
    nearest: Near | None

    @property
    def contradicts(self) -> bool:
        """Whether a base other than the stated one is clearly nearer, and the stated one not close; or close, where the
        stated one is in the run and has too few of the layers."""
        if self.nearest is None or self.parent is None or self.nearest.model == self.parent:
            return False
        if self.stated is None:
            return self.nearest.distance < CLOSE
        return self.stated.distance >= CLOSE and self.nearest.distance <= CLEARLY * self.stated.distance

    @property
    def verdict(self) -> Verdict | None:
        """What the distances say; None where there is nothing to compare with.

        ``other``: another base contradicts the stated one. Where a base is stated and can be compared: ``as stated`` it
        is close; ``stated, far``: it is the nearest, but not close; ``unclear``: another is a little nearer, none is
        close. Else ``close`` or ``far``, of the nearest.
        """
        if self.nearest is None:
            return None
        if self.contradicts:
            return "other"
        if self.stated is None:
            return "close" if self.nearest.distance < CLOSE else "far"
        if self.stated.distance < CLOSE:
            return "as stated"
        return "stated, far" if self.nearest.model == self.stated.model else "unclear"


def common_names(names: Sequence[str]) -> tuple[str, ...]:
    """Layer names without the leading words that all numbered layers of the model share.

    The same weights are ``h.0.attn.c_attn`` in one file and ``transformer.h.0.attn.c_attn`` in another.

    >>> common_names(["transformer.wte", "transformer.h.0.attn", "transformer.h.1.attn"])
    ('wte', '0.attn', '1.attn')
    >>> common_names(["encoder.0.mlp", "decoder.0.mlp"])
    ('encoder.0.mlp', 'decoder.0.mlp')
    """
    split = [name.split(".") for name in names]
    heads = [words[: _first_number(words)] for words in split if _first_number(words) < len(words)]
    shared: list[str] = []
    for column in zip(*heads, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    short = []
    for words in split:
        cut = 0
        while cut < min(len(shared), len(words) - 1) and words[cut] == shared[cut]:
            cut += 1
        short.append(".".join(words[cut:]))
    # Names that would become equal stay as they are: a layer must never stand for another.
    return tuple(short) if len(set(short)) == len(short) else tuple(names)


def kinships(profiles: Sequence[Profile]) -> list[Kinship]:
    """For each model where it comes from, by statement and by distance.

    A model's nearest base is looked for among the bases, and among what other models are said to come from, but never
    among the models that come from itself. Of equals it is the stated one, then the first. It is exact but for one
    case: of more than ``FEW`` bases with a model's layers, where none is stated and none is close, it is the nearest of
    the ``CHECKED`` whose signatures are nearest.
    """
    index = {profile.model_id: number for number, profile in enumerate(profiles)}
    parents = [_parent(profile, index, number) for number, profile in enumerate(profiles)]
    stated = set(parents)
    possible = [number for number, profile in enumerate(profiles) if profile.is_base or number in stated]
    bases = _Bases(profiles, possible)
    found: list[Kinship | None] = [None] * len(profiles)
    for layers, members in _by_layers(profiles, range(len(profiles))).items():
        candidates = bases.of(layers)
        distances = candidates.distances([profiles[number].alpha for number in members], members, parents)
        for number, near in zip(members, distances, strict=True):
            parent = parents[number]
            near.sort(key=lambda each: (each.distance, each.model != parent, each.model))
            nearest = next((each for each in near if number not in _ancestors(each.model, parents)), None)
            own = next((each for each in near if each.model == parent), None)
            found[number] = Kinship(parent, own, nearest)
    return [kinship for kinship in found if kinship is not None]


def _first_number(words: Sequence[str]) -> int:
    return next((place for place, word in enumerate(words) if word.isdigit()), len(words))


def _parent(profile: Profile, index: Mapping[str, int], number: int) -> int | None:
    parent = index.get(profile.source) if profile.source is not None else None
    return None if parent == number else parent


def _ancestors(number: int, parents: Sequence[int | None]) -> set[int]:
    """What a model comes from, over any number of steps; a circle in the list ends it."""
    found: set[int] = set()
    at = parents[number]
    while at is not None and at not in found:
        found.add(at)
        at = parents[at]
    return found


def _by_layers(profiles: Sequence[Profile], numbers: Sequence[int]) -> dict[tuple[str, ...], list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in numbers:
        groups.setdefault(profiles[number].layers, []).append(number)
    return groups


class _Bases:
    """The bases of a run by their layers, found by the rarest names of a model's layers."""

    def __init__(self, profiles: Sequence[Profile], possible: Sequence[int]):
        self._profiles = profiles
        self._groups = list(_by_layers(profiles, possible).items())
        self._having: dict[str, list[int]] = {}
        for group, (layers, _) in enumerate(self._groups):
            for name in layers:
                self._having.setdefault(name, []).append(group)

    def of(self, layers: tuple[str, ...]) -> _Candidates:
        """The bases that have LEAST_SHARE of these layers."""
        import numpy as np

        least = next((n for n in range(len(layers) + 1) if n >= LEAST_SHARE * len(layers)), 0)
        # What has so many of the names lacks so few of them that it has one of any of this many: of the rarest.
        rarest = sorted(layers, key=lambda name: len(self._having.get(name, ())))[: len(layers) - least + 1]
        groups = {group for name in rarest for group in self._having.get(name, ())}
        place = {name: number for number, name in enumerate(layers)}
        numbers: list[int] = []
        blocks: list[Floats] = []
        for group in sorted(groups):
            others, members = self._groups[group]
            shared = [(place[name], at) for at, name in enumerate(others) if name in place]
            if len(shared) < least:
                continue
            mine, theirs = (list(each) for each in zip(*shared, strict=True))
            block = np.full((len(members), len(layers)), np.nan)
            block[:, mine] = np.stack([self._profiles[number].alpha for number in members])[:, theirs]
            numbers += members
            blocks.append(block)
        return _Candidates(numbers, np.concatenate([np.empty((0, len(layers))), *blocks]))


class _Candidates:
    """Bases that have the layers of some models: their numbers, and a row of alphas each, NaN without a fit.

    Of few all distances are computed. Of many those that can be the nearest, found in two ways. A signature is the
    median alpha of every sixteenth layer; a k-d tree finds the bases with the nearest ones. And a base at a distance of
    at most d has half of its layers within d of the model's: with the alphas of each layer in order, two binary
    searches a layer find all bases that have so many, of which there are few where d is small.
    """

    def __init__(self, numbers: Sequence[int], alpha: Floats):
        self._numbers = numbers
        self._alpha = alpha

    def distances(
        self, models: Sequence[Floats], members: Sequence[int], parents: Sequence[int | None]
    ) -> list[list[Near]]:
        """For each model its distances from bases with enough common fits: from all, or from those that can be the
        nearest or are stated.

        Args:
            models: their alphas. members: their numbers. parents: of all models of the run, what each is said to come
                from.
        """
        everything = range(len(self._numbers))
        if len(self._numbers) <= FEW:
            return [self._near(own, number, everything) for own, number in zip(models, members, strict=True)]
        place = {number: at for at, number in enumerate(self._numbers)}
        found: list[list[Near]] = []
        checked: list[set[int]] = []
        for own, number, alike in zip(models, members, self._nearest_signatures(models), strict=True):
            parent = parents[number]
            some = {*alike, place[parent]} if parent in place else {*alike}
            near = self._near(own, number, sorted(some))
            if not any(number not in _ancestors(each.model, parents) for each in near):
                some = {*everything}
                near = self._near(own, number, everything)
            found.append(near)
            checked.append(some)
        reach = [self._search_radius(near, parents[number]) for near, number in zip(found, members, strict=True)]
        for at, others in enumerate(self._within(models, reach)):
            found[at] += self._near(models[at], members[at], sorted({*others} - checked[at]))
        return found

    def _search_radius(self, near: Sequence[Near], parent: int | None) -> float:
        """Up to which distance no base may be missed, so that the verdict is that of all bases."""
        best = min((each.distance for each in near), default=math.inf)
        return best if any(each.model == parent for each in near) else min(best, CLOSE)

    def _near(self, own: Floats, number: int, candidates: Sequence[int]) -> list[Near]:
        """The distance of a model from each of these bases with enough common fits."""
        import numpy as np

        found: list[Near] = []
        least = max(1.0, LEAST_SHARE * np.isfinite(own).sum())
        step = max(1, _BLOCK // max(1, len(own)))
        for start in range(0, len(candidates), step):
            block = list(candidates[start : start + step])
            middle, counts = _medians(np.abs(self._alpha[block] - own))
            for other, count, distance in zip(block, counts.tolist(), middle.tolist(), strict=True):
                if self._numbers[other] != number and count >= least:
                    found.append(Near(self._numbers[other], distance, count))
        return found

    def _nearest_signatures(self, models: Sequence[Floats]) -> list[list[int]]:
        import numpy as np
        from scipy.spatial import KDTree

        _, alike = KDTree(_signatures(self._alpha)).query(_signatures(np.stack(models)), k=CHECKED, p=1)
        found: list[list[int]] = np.asarray(alike).tolist()
        return found

    def _within(self, models: Sequence[Floats], reach: Sequence[float]) -> Iterator[list[int]]:
        """For each model all bases at a distance up to its reach, and some others."""
        import numpy as np

        size, layers = self._alpha.shape
        order = np.argsort(self._alpha, axis=0)
        ordered = np.take_along_axis(self._alpha, order, axis=0)
        flat = order.T.ravel()
        own = np.stack(models)
        radius = np.array(reach)[:, None] * (1 + 1e-9) + 1e-12
        first, last = np.empty(own.shape, np.int64), np.empty(own.shape, np.int64)
        for layer in range(layers):
            first[:, layer] = np.searchsorted(ordered[:, layer], (own - radius)[:, layer], "left")
            last[:, layer] = np.searchsorted(ordered[:, layer], (own + radius)[:, layer], "right")
        last[np.isnan(own)] = first[np.isnan(own)]
        fits = np.isfinite(own).sum(axis=1)
        # Of so many common fits at least, as many as are up to the lower of the two in the middle.
        half = (np.ceil(np.maximum(1.0, LEAST_SHARE * fits)).astype(np.int64) - 1) // 2 + 1
        for at in range(len(models)):
            lengths = last[at] - first[at]
            starts = np.arange(layers) * size + first[at] - np.cumsum(lengths) + lengths
            hits = flat[np.repeat(starts, lengths) + np.arange(lengths.sum())]
            yield np.flatnonzero(np.bincount(hits, minlength=size) >= half[at]).tolist()


def _signatures(alpha: Floats) -> Floats:
    """A few numbers that are alike for rows that are: medians over every sixteenth layer, 0 without a fit."""
    import numpy as np

    size = min(_SIGNATURE, alpha.shape[1])
    columns = [_medians(alpha[:, start::size])[0] for start in range(size)]
    return np.nan_to_num(np.stack(columns, axis=1))


def _medians(values: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The median of each row without its NaN, NaN where it has nothing else; and how many numbers it has."""
    import numpy as np

    ordered = np.sort(values, axis=1)
    counts = np.isfinite(ordered).sum(axis=1)
    rows = np.arange(len(values))
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, values.shape[1] - 1)
    return (ordered[rows, low] + ordered[rows, high]) / 2, counts
