"""Critical Xid errors as the driver tells them: an event each, to those who have asked, from then on.

Knows one session of the driver; the caller holds it open. A driver or GPU that has no such events tells none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pynvml

# So many events are fetched in one go; a GPU in a bad way sends them without end.
_MOST_AT_ONCE = 64


class XidEvents:
    """The events of these GPUs (handles by UUID) since it was made."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._uuids = {_number(handle): uuid for uuid, handle in handles.items()}
        self._seen: dict[str, tuple[int, int]] = {}
        self._set: Any | None = None
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for handle in handles.values():
            self._register(handle)

    def _register(self, handle: Any) -> None:
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except pynvml.NVMLError:
            return  # this GPU has no events

    def seen(self) -> Mapping[str, tuple[int, int]]:
        """By UUID, the number of the last Xid and how many there have been; GPUs without any are missing."""
        for _ in range(_MOST_AT_ONCE if self._set is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                break  # no more for now, or the driver fails, which the next snapshot tells
            uuid = self._uuids.get(_number(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                self._seen[uuid] = (int(event.eventData), self._seen.get(uuid, (0, 0))[1] + 1)
        return self._seen

    def close(self) -> None:
        """Asks for no more events."""
        if self._set is not None:
            try:
                pynvml.nvmlEventSetFree(self._set)
            except pynvml.NVMLError:
                return  # the driver is gone, and the set with it
            finally:
                self._set = None


def _number(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
