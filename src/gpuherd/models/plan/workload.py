"""What the model is to do, and what is kept free beside it. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuherd.errors import UsageError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """Answers to generate at once. Raises UsageError for numbers below 1.

    Attributes:
        batch: sequences at once on one replica.
        prompt_tokens, new_tokens: of each sequence, at most.
    """

    batch: int = 1
    prompt_tokens: int = 512
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens", "new_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: it must be a whole number, at least 1")

    @property
    def tokens(self) -> int:
        """The longest that a sequence becomes."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory on each GPU that no formula predicts, in bytes: kept free, and shown as such in every plan.

    Attributes:
        context: what CUDA and its libraries take for themselves in a process that uses the GPU.
        fixed: against small surprises: workspaces of cuBLAS, the allocator's rounding.
        share: against fragmentation: of the GPU's whole memory.
    """

    context: int = 512 * MIB
    fixed: int = 256 * MIB
    share: float = 0.05

    def on(self, total: int) -> int:
        """Bytes that are kept free on a GPU of ``total`` bytes, the context not counted."""
        return self.fixed + int(self.share * total)

    def with_beside(self, size: int) -> Reserve:
        """With so many bytes more on each GPU, for another model that lies beside the planned one."""
        return replace(self, fixed=self.fixed + size)
