"""What the model is to do, what is kept free beside it, and what it keeps of each sequence while it does it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import LayerCache
from gpuherd.models.memory.weights import Precision

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

    def with_fixed(self, size: int) -> Reserve:
        """With so many bytes more on each GPU, for another model next to the planned one."""
        return replace(self, fixed=self.fixed + size)


# Bytes that a model keeps of each sequence while it generates: keys and values, and the states of recurrent layers.
# Pure; equal to the storage that transformers' ``DynamicCache`` holds (checked in tests, transformers 5.23).
#
# Three facts that were measured, not guessed:
#
# - After ``new_tokens`` answers the last token has never been fed back: ``prompt + new - 1`` tokens are kept.
# - A sliding-window layer keeps ``window - 1`` tokens, but as a view of the ``window`` tokens that it joined: the
#   storage is ``window`` tokens long. **After the prompt the view is one of the whole prompt**: until the first answer
#   token is computed, sliding layers hold the prompt as full ones do. Hence the two moments below; the greater counts.
# - An encoder-decoder model keeps keys and values of the encoder's tokens (the prompt); its own start from one token.

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes at two moments: when the prompt has been read, and when the last answer token is there."""

    after_prompt: int = 0
    at_end: int = 0

    @property
    def largest(self) -> int:
        """The greater of the two. While the first answer token is computed it can be one token a full layer more."""
        return max(self.after_prompt, self.at_end)

    def __mul__(self, times: int) -> CacheSizes:
        return CacheSizes(self.after_prompt * times, self.at_end * times)


def sequence_bytes(cache: LayerCache, workload: Workload, precision: Precision, *, decoder_only: bool) -> CacheSizes:
    """What one layer keeps of one sequence.

    >>> from gpuherd.models.memory.kv_cache import Workload
    >>> one = LayerCache(per_token=2 * 8 * 128)
    >>> sequence_bytes(one, Workload(1, 512, 65), Precision.BF16, decoder_only=True)
    CacheSizes(after_prompt=2097152, at_end=2359296)
    """
    number = precision.number_bytes
    read = workload.prompt_tokens if decoder_only else 1
    written = read + workload.new_tokens - 1
    always = cache.per_sequence * number + cache.per_sequence_fp32 * _FLOAT32
    always += cache.per_encoder_token * number * (0 if decoder_only else workload.prompt_tokens)
    token = cache.per_token * number
    bounded = cache.window is not None and cache.window > 1  # of a window of 1 transformers keeps everything
    at_end = min(written, cache.window or 0) if bounded and written > read else written
    return CacheSizes(always + token * read, always + token * at_end)
