"""Settings of a sweep: every combination of its parameters' values, or so many that are drawn. Pure.

Each draw has a key of its own: the seed, the parameter's name, and the number of the draw. So it depends on nothing
else in the file. More samples go on where fewer ended, and a parameter that is added leaves what is drawn for the
others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, product

from gpuherd.batch.distributions import Distribution

# A setting that was drawn before is drawn anew; so many times as many draws are made before it is given up. Drawing
# all of n settings takes about n * ln(n) draws, and there are never more than a million.
_PATIENCE = 20
_LEAST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What is swept over what. ``samples`` None: all combinations, in order; else so many different ones, drawn."""

    parameters: Mapping[str, Distribution]
    samples: int | None = None
    seed: int = 0

    def combinations(self) -> int | None:
        """How many there are, None for more than could be counted off."""
        sizes = [parameter.size() for parameter in self.parameters.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def size(self) -> int | None:
        """How many settings it stands for; None where it can't be a grid."""
        return self.combinations() if self.samples is None else self.samples

    def settings(self) -> Iterator[Mapping[str, str]]:
        """The settings. Raises ValueError when too few different ones are found."""
        return self._grid() if self.samples is None else self._drawn(self.samples)

    def _grid(self) -> Iterator[Mapping[str, str]]:
        for values in product(*(parameter.values() for parameter in self.parameters.values())):
            yield dict(zip(self.parameters, values, strict=True))

    def _drawn(self, samples: int) -> Iterator[Mapping[str, str]]:
        made: set[tuple[str, ...]] = set()
        for number in count():
            values = tuple(
                parameter.draw(random_bits(self.seed, name, number)) for name, parameter in self.parameters.items()
            )
            if values not in made:
                made.add(values)
                yield dict(zip(self.parameters, values, strict=True))
            if len(made) == samples:
                return
            if number >= max(_LEAST_DRAWS, _PATIENCE * samples):
                raise ValueError(
                    f"only {len(made)} different settings were found in {number + 1} draws; ask for fewer samples"
                )


def random_bits(seed: int, name: str, number: int) -> int:
    """64 random bits, the same for the same key on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}\0{number}".encode(), digest_size=8).digest(), "big")
