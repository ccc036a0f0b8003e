"""Which model comes from which: by what the list says, and by which base's alphas are nearest. Pure.

A fine-tune hardly moves the spectra of its base: over 392 published pairs the median over layers of |Δalpha| is 0.0028,
against 0.755 for another base with the same layers, and in 95 % of the comparisons a model's own base is the nearest.
So the nearest base by that distance is a strong hint, and is told where it is not the one that was stated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    among the models that come from itself.
    """
    index = {profile.model_id: number for number, profile in enumerate(profiles)}
    parents = [_parent(profile, index, number) for number, profile in enumerate(profiles)]
    possible = [number for number, profile in enumerate(profiles) if profile.is_base or number in set(parents)]
    distances = _distances(profiles, possible)
    found = []
    for number, parent in enumerate(parents):
        near = distances[number]
        allowed = [each for each in near.values() if number not in _ancestors(each.model, parents)]
        # Of equals the stated one, then the first.
        nearest = min(allowed, key=lambda each: (each.distance, each.model != parent, each.model), default=None)
        found.append(Kinship(parent, near.get(parent) if parent is not None else None, nearest))
    return found


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


def _distances(profiles: Sequence[Profile], possible: Sequence[int]) -> list[dict[int, Near]]:
    """For each model its distance from each base that has enough of its layers. Models of equal layers go together."""
    near: list[dict[int, Near]] = [{} for _ in profiles]
    children = _by_layers(profiles, range(len(profiles)))
    bases = _by_layers(profiles, possible)
    for layers, members in children.items():
        for base_layers, candidates in bases.items():
            pair = _shared(layers, base_layers)
            if len(pair[0]) < LEAST_SHARE * len(layers):
                continue
            for number in members:
                for each in _nearness(profiles, number, candidates, pair):
                    near[number][each.model] = each
    return near


def _by_layers(profiles: Sequence[Profile], numbers: Sequence[int]) -> dict[tuple[str, ...], list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in numbers:
        groups.setdefault(profiles[number].layers, []).append(number)
    return groups


def _shared(layers: tuple[str, ...], others: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """The places of the names that both have, in each."""
    if layers == others:
        return list(range(len(layers))), list(range(len(layers)))
    place = {name: number for number, name in enumerate(others)}
    mine = [number for number, name in enumerate(layers) if name in place]
    return mine, [place[layers[number]] for number in mine]


def _nearness(
    profiles: Sequence[Profile], number: int, candidates: Sequence[int], pair: tuple[list[int], list[int]]
) -> list[Near]:
    """The distance of one model from each candidate with enough common fits."""
    import numpy as np

    own = profiles[number].alpha[pair[0]]
    least = max(1.0, LEAST_SHARE * np.isfinite(profiles[number].alpha).sum())
    found: list[Near] = []
    step = max(1, _BLOCK // max(1, len(own)))
    for start in range(0, len(candidates), step):
        block = candidates[start : start + step]
        away = np.abs(np.stack([profiles[other].alpha[pair[1]] for other in block]) - own)
        away.sort(axis=1)  # NaN comes last
        counts = np.isfinite(away).sum(axis=1)
        rows = np.arange(len(block))
        middle = (away[rows, np.maximum(counts - 1, 0) // 2] + away[rows, np.minimum(counts // 2, len(own) - 1)]) / 2
        for other, count, distance in zip(block, counts, middle, strict=True):
            if other != number and count >= least:
                found.append(Near(other, float(distance), int(count)))
    return found
