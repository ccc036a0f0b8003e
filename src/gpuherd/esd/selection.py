"""Which matrices of a model are analysed: ``--layers`` and ``--exclude``. Pure: matrices in, matrices out.

Shell patterns (``*``, ``?``, ``[abc]``), case-sensitive, on the whole of a matrix's name or of its tensor's. A pattern
that matches nothing is an error and not an empty result: it was meant for another model, or is misspelt.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import translate
from typing import TYPE_CHECKING

from gpuherd.errors import BadModel

if TYPE_CHECKING:
    from gpuherd.models.tensors.matrices import WeightMatrix

NOT_SELECTED = "not selected by --layers"
MOST_SHOWN = 3
# Names compared by spelling, which is slow; a model has some dozens of kinds of names.
MOST_COMPARED = 1000
LEAST_LIKENESS = 0.6


def selected(
    matrices: Sequence[WeightMatrix], tensors: Iterable[str], layers: Sequence[str], exclude: Sequence[str]
) -> list[WeightMatrix]:
    """The matrices, those that are left out with the reason in ``skip``.

    Args:
        matrices: of one model.
        tensors: names of all its tensors. A pattern may match one that is no matrix (``*.bias``) without an error.
        layers: patterns, of which a matrix must match one; none of them: all do.
        exclude: patterns, of which it may match none. They count more than ``layers``.

    Raises:
        BadModel: a pattern that matches no name of this model; its text names the nearest.
    """
    if not layers and not exclude:
        return list(matrices)
    names = list(dict.fromkeys([*(matrix.longname for matrix in matrices), *tensors]))
    compiled = {pattern: re.compile(translate(pattern)) for pattern in (*layers, *exclude)}
    for pattern, expression in compiled.items():
        if not any(expression.match(name) for name in names):
            option = "--layers" if pattern in layers else "--exclude"
            raise BadModel(f"{option} {pattern!r} matches no tensor of this model{_nearest(pattern, names)}")

    def first_match(matrix: WeightMatrix, patterns: Sequence[str]) -> str | None:
        both = (matrix.longname, matrix.tensor)
        return next((pattern for pattern in patterns if any(compiled[pattern].match(name) for name in both)), None)

    def judged(matrix: WeightMatrix) -> WeightMatrix:
        if matrix.skip is not None:
            return matrix
        excluded = first_match(matrix, exclude)
        if excluded is not None:
            return replace(matrix, skip=f"left out by --exclude {excluded!r}")
        return replace(matrix, skip=NOT_SELECTED) if layers and first_match(matrix, layers) is None else matrix

    return [judged(matrix) for matrix in matrices]


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """The end of the error: the names that were most likely meant.

    Names that have the pattern's words in them; else those that are spelt most like it, one for each kind of layer.
    """
    words = [word.strip(".").lower() for word in re.split(r"[*?]+|\[[^]]*\]", pattern)]
    words = [word for word in words if word]
    near = [name for name in names if words and all(word in name.lower() for word in words)]
    if not near:
        kinds: dict[str, str] = {}
        for name in names:
            kinds.setdefault(re.sub(r"\d+", "0", name).lower(), name)
        wanted = re.sub(r"\d+", "0", re.sub(r"[*?]", "", pattern)).lower()
        scored = sorted(((_likeness(wanted, kind), kind) for kind in list(kinds)[:MOST_COMPARED]), reverse=True)
        near = [kinds[kind] for score, kind in scored if score >= LEAST_LIKENESS]
    if not near:
        return f"; its first is {names[0]}" if names else ""
    hint = "" if any(sign in pattern for sign in "*?[") else f" (a pattern matches the whole name: '*{pattern}*'?)"
    return f"; nearest: {', '.join(near[:MOST_SHOWN])}{hint}"


def _likeness(wanted: str, name: str) -> float:
    """How alike they are spelt, 0 to 1: as a whole, or the end of the name, which is what patterns mostly give."""
    ends = (name, name[-len(wanted) :] if wanted else name)
    return max(difflib.SequenceMatcher(None, wanted, end, autojunk=False).ratio() for end in ends)
