"""Which of the machine's GPUs this process may use: its own CUDA_VISIBLE_DEVICES, read and set.

A process that was started with the variable may not go beyond it. What ``show_only`` sets later is a choice, which can
be made anew until CUDA starts; so the value from before is remembered.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.errors import CudaAlreadyStarted
from gpuherd.gpus import cuda
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import visible

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What we set the variable to, and what it was before."""

    value: str
    before: str | None


_choice: _Choice | None = None


def _present() -> str | None:
    """CUDA_VISIBLE_DEVICES now. A value that is not our choice was given to us, and ends the choice."""
    global _choice
    value = os.environ.get(VISIBLE)
    if _choice is not None and _choice.value != value:
        _choice = None
    return value


def started_with() -> str | None:
    """CUDA_VISIBLE_DEVICES as this process was given it, whatever was chosen since."""
    value = _present()
    return value if _choice is None else _choice.before


def visible_now(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows this process, in CUDA's order."""
    _warn_of_other_order(gpus)
    return visible(gpus, _present())


def visible_from_start(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that this process may choose from."""
    _warn_of_other_order(gpus)
    return visible(gpus, started_with())


def show_only(names: Sequence[str]) -> None:
    """Sets CUDA_VISIBLE_DEVICES to these names and CUDA_DEVICE_ORDER so that indices are in PCI order.

    Raises:
        CudaAlreadyStarted: CUDA runs in this process with another value, so that setting it would have no effect.
    """
    global _choice
    value = ",".join(names)
    present = os.environ.get(VISIBLE)
    if cuda.started():
        if value == present:
            return
        raise CudaAlreadyStarted(
            f"{VISIBLE} can't become {value!r}: this process has started CUDA "
            f"{'without it' if present is None else f'with {present!r}'}, and CUDA reads it only then; "
            "choose GPUs before anything uses CUDA, or in a new process"
        )
    _choice = _Choice(value, started_with())
    os.environ[VISIBLE] = value
    os.environ[ORDER] = PCI_ORDER


def count_in_pci_order() -> None:
    """Makes CUDA number GPUs as this room does, unless it has started already or the user wants another order."""
    if not cuda.started():
        os.environ.setdefault(ORDER, PCI_ORDER)


def _warn_of_other_order(gpus: Sequence[Gpu]) -> None:
    """Indices mean other GPUs to CUDA when it counts from the fastest and the GPUs differ."""
    if os.environ.get(ORDER) == "FASTEST_FIRST" and len({gpu.name for gpu in gpus if gpu.mig_parent is None}) > 1:
        logger.warning(
            "%s=FASTEST_FIRST on a machine with different GPUs: GPU ids here are in PCI order; set %s=%s",
            ORDER,
            ORDER,
            PCI_ORDER,
        )
