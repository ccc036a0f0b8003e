"""Bytes of tensors that live during a training step, counted as they come and go.

A dispatch mode sees every tensor that torch makes, in the forward and in the backward pass; a storage counts until
nothing holds it any more. With fake tensors nothing is computed or allocated, so that models of any size can be
measured. It knows nothing of the formulas that are tested.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpuherd.posttrain.engine.strategies import enable_checkpointing


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages; ``peak`` is the most since it was last set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that was there before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return
        self._live[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)

    def __enter__(self) -> Meter:
        """FSDP frees storages by resizing them, which no operation tells."""
        self._resize = torch.UntypedStorage.resize_
        original, meter = self._resize, self

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in meter._live:
                meter.now += size - meter._live[storage._cdata]
                meter._live[storage._cdata] = size
                meter.peak = max(meter.peak, meter.now)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*problem)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes beyond the parameters: kept when the loss is there; at most in the forward pass; at most in the backward
    pass; left at its end (the gradients)."""

    kept: int
    forward: int
    backward: int
    gradients: int


def measure(
    model: Any,
    ids: torch.Tensor,
    *,
    mixed: bool = False,
    checkpointing: bool = False,
    mask: torch.Tensor | None = None,
    local: bool = False,
) -> Measured:
    """One forward and backward pass of a causal model on its own text; ``local`` for parameters that are divided."""
    model.train()
    if checkpointing:
        enable_checkpointing(model)
    with Meter() as meter:
        parameters = [part._local_tensor if local else part for part in model.parameters()]
        for tensor in (*parameters, *model.buffers(), ids):
            meter.add(tensor)
        before = meter.now
        with autocast() if mixed else contextlib.nullcontext():
            loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        kept, forward = meter.now - before, meter.peak - before
        meter.peak = meter.now
        loss.backward()
        return Measured(kept, forward, meter.peak - before, meter.now - before)


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    """bfloat16 products on the CPU."""
    with torch.autocast("cpu", torch.bfloat16):
        yield


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Tensors without storage, that know their shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
