"""Where a matrix stands in its model, read off its name: the layer that it is in and the module that it is there.

So the figures of a model become a table of layers x modules. Pure; knows names only, no files and no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# The module of a matrix that is a layer of its own, like an output head: no tensor's part is called so behind a number.
WHOLE = "weight"
_LONGEST_NUMBER = 9


class Place(NamedTuple):
    """A matrix's cell in the table.

    Attributes:
        layer: the name up to and with the layer's number (``model.layers.3``); without a number, the whole name.
        number: the layer's number, None where the name has none.
        module: the rest of the name; ``weight`` where nothing is left.
    """

    layer: str
    number: int | None
    module: str


@dataclass(frozen=True, slots=True)
class AlphaMatrix:
    """One figure of a model's matrices, layers x modules.

    Attributes:
        layers: names of the rows: the numbered layers, stack by stack, each stack in order; then what has no number.
        numbers: the layers' numbers, None for what has none.
        modules: names of the columns, in the order in which the model has them.
        values: a row a layer; None where the layer has no such module, or the module no such figure.
    """

    layers: tuple[str, ...]
    numbers: tuple[int | None, ...]
    modules: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


def place_of(longname: str) -> Place:
    """Where the matrix of this name stands. The layer's number is the first in the name; not the very first part where
    a further number follows, which then counts the models of a pipeline.

    >>> place_of("model.layers.3.self_attn.q_proj")
    Place(layer='model.layers.3', number=3, module='self_attn.q_proj')
    >>> place_of("0.auto_model.encoder.layer.5.output.dense")
    Place(layer='0.auto_model.encoder.layer.5', number=5, module='output.dense')
    >>> place_of("lm_head")
    Place(layer='lm_head', number=None, module='weight')
    """
    parts = longname.split(".")
    at = [index for index, part in enumerate(parts) if _is_number(part)]
    if not at:
        return Place(longname, None, WHOLE)
    index = at[1] if at[0] == 0 and len(at) > 1 else at[0]
    rest = ".".join(parts[index + 1 :])
    return Place(".".join(parts[: index + 1]), int(parts[index]), rest or WHOLE)


def alpha_matrix(figures: Mapping[str, float | None] | Iterable[tuple[str, float | None]]) -> AlphaMatrix:
    """The table of a figure (``alpha``) by names of matrices; ``figures`` in the order of the model."""
    pairs = figures.items() if isinstance(figures, Mapping) else figures
    cells: dict[tuple[str, str], float | None] = {}
    numbers: dict[str, int | None] = {}
    modules: dict[str, None] = {}
    for longname, value in pairs:
        place = place_of(longname)
        numbers.setdefault(place.layer, place.number)
        modules.setdefault(place.module)
        cells[place.layer, place.module] = value
    layers = _in_order(numbers)
    values = tuple(tuple(cells.get((layer, module)) for module in modules) for layer in layers)
    return AlphaMatrix(layers, tuple(numbers[layer] for layer in layers), tuple(modules), values)


def _in_order(numbers: Mapping[str, int | None]) -> tuple[str, ...]:
    """Stacks (what stands before the number) in the order in which they first occur, their layers by number."""
    stacks: dict[str, int] = {}
    for layer, number in numbers.items():
        if number is not None:
            stacks.setdefault(_stack(layer), len(stacks))

    def key(layer: str) -> tuple[int, int]:
        number = numbers[layer]
        return (len(stacks), 0) if number is None else (stacks[_stack(layer)], number)

    return tuple(sorted(numbers, key=key))


def _stack(layer: str) -> str:
    return layer.rpartition(".")[0]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= _LONGEST_NUMBER
