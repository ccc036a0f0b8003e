"""Several rows in one sequence, without a token of one seeing a token of another.

Rows of unlike lengths leave most of a batch empty. Packed, each begins at position 0 again, the attention mask is block
diagonal and causal in each block, and the first token of a row is no label: it would be learnt from the row before. So
the loss is that of the rows one by one.

The plan is pure. Models whose layers look at more than the mask says (a sliding window, a recurrent state) can't be
packed: ``refusal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.errors import UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

PADDING = -1  # the segment of what fills a sequence up
_WHOLE = ("full_attention", "attention")


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows behind each other in one sequence.

    Attributes:
        rows: their places in what was packed, in the order in which they stand.
        lengths: tokens of each.
        length: of the sequence, padding included.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    length: int

    def laid(self, values: Sequence[Sequence[T]], padding: T) -> list[T]:
        """The values of each row's tokens (ids, weights), as it stands in the sequence; ``length`` of them."""
        found = [value for row in self.rows for value in values[row]]
        return found + [padding] * (self.length - len(found))

    def learnt(self, values: Sequence[Sequence[T]], nothing: T) -> list[T]:
        """The same of labels or weights, with ``nothing`` for padding and for the first token of each row: what stands
        before it is another row."""
        return self.laid([[nothing, *row[1:]][: len(row)] for row in values], nothing)

    @property
    def position_ids(self) -> list[int]:
        """From 0 in each row, and in the padding."""
        empty = self.length - sum(self.lengths)
        return [place for length in (*self.lengths, empty) for place in range(length)]

    @property
    def segments(self) -> list[int]:
        """Of each token the number of its row in this sequence, from 0; ``PADDING``."""
        found = [number for number, length in enumerate(self.lengths) for _ in range(length)]
        return found + [PADDING] * (self.length - len(found))


def plan(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assigns rows to sequences of ``capacity`` tokens: first-fit decreasing, which takes at most 11/9 of the fewest
    sequences and 6/9 of one (Dósa 2007). Of rows of one length the first comes first: the plan is the same every time.

    O(n log n): a tree over the room that is left in each sequence finds the first that a row fits into. Raises
    UsageError for a row that is longer than a sequence.

    >>> plan([5, 3, 8, 2, 4], 8)
    [[2], [0, 1], [4, 3]]
    """
    if lengths and max(lengths) > capacity:
        raise UsageError(
            f"row {lengths.index(max(lengths)) + 1} has {max(lengths)} tokens, and a packed sequence {capacity}; leave "
            "such rows out, or pack into longer ones"
        )
    leaves = 1 << max(1, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node n has the children 2n and 2n + 1: the most room below it
    sequences: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < lengths[row]:
                node += 1
        if node - leaves == len(sequences):
            sequences.append([])
        sequences[node - leaves].append(row)
        room[node] -= lengths[row]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sequences


def pack(lengths: Sequence[int], capacity: int, *, multiple: int = 1) -> list[Packed]:
    """The sequences of a plan, all as long as the longest.

    Args:
        lengths: tokens of each row.
        multiple: the length of the sequences is one of this, where ``capacity`` allows.

    Raises UsageError for a row that is longer than ``capacity``.
    """
    planned = [(tuple(some), tuple(lengths[row] for row in some)) for some in plan(lengths, capacity)]
    longest = max((sum(own) for _, own in planned), default=0)
    length = min(capacity, -(-longest // multiple) * multiple)
    return [Packed(rows, own, length) for rows, own in planned]


def attention_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive attention mask of packed rows: 0 where a token may look (its own row, itself and before), else the
    least number of the dtype.

    Args:
        segments: (batch, length) of ``Packed.segments``.

    Returns (batch, 1, length, length), which transformers' ``sdpa`` and ``eager`` attention take as it is. Padding sees
    padding, so that no row of the mask is empty and no softmax is NaN.
    """
    import torch

    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    allowed = (segments[:, :, None] == segments[:, None, :]) & causal
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def mask_bytes(sequences: int, tokens: int, itemsize: int) -> int:
    """The most that ``attention_mask`` has in memory for so many sequences of so many tokens: the mask in a dtype of so
    many bytes, the two tables of truth values that it is made of, and a causal one."""
    return tokens**2 * (sequences * (itemsize + 2) + 1)


def refusal(config: Any, attention: str) -> str | None:
    """Why a model can't be packed, as the end of a sentence; None where it can.

    Args:
        config: of transformers.
        attention: its implementation (``eager``, ``sdpa``, ...).
    """
    text = config.get_text_config()
    if attention not in ("eager", "sdpa"):
        return f"attention {attention} takes no mask of blocks; set sdpa"
    other = sorted({each for each in getattr(text, "layer_types", None) or () if each not in _WHOLE})
    if other:
        return f"it has layers of {', '.join(other)}, which look at more or less than a mask of blocks says"
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True) and not getattr(text, "layer_types", None):
        return f"it attends in a window of {window} tokens, which a mask of blocks does not say"
    recurrent = ("mamba", "rwkv", "recurrent", "xlstm")
    if any(name in str(getattr(text, "model_type", "")).lower() for name in recurrent):
        return "its layers keep a state, which goes on from row to row"
    return None
