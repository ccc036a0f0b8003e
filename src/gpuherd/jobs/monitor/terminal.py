"""The terminal while a live display is on it: Ctrl-C is heard as ever, but does not write ``^C`` into the picture. And
text on streams whose encoding lacks some of its characters: those are written as escapes.

The characters that the terminal echoes for a control key move the cursor behind the display's back, so that old lines
stay in the scrollback. Only the one flag (ECHOCTL) is changed, and given back at the end.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper

_LOCAL_FLAGS = 3  # where tcgetattr has them


def escape_what_encoding_lacks(stream: object) -> None:
    """From now on a character that the stream's encoding lacks (an arrow in Latin-1) is written as an escape.

    By default Python raises UnicodeEncodeError: one line of one job's log would end a run.
    """
    if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


@contextmanager
def quiet_control_keys() -> Iterator[None]:
    """Switches the echo of control keys off on the controlling terminal while the context lasts; none is no error."""
    was_on = _set_echo(False)
    try:
        yield
    finally:
        if was_on:
            _set_echo(True)


def _set_echo(wanted: bool) -> bool:
    """Sets the flag and returns how it was; False as well where it can't be set."""
    with suppress(OSError, termios.error):
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            # In the background the terminal is somebody else's, and the kernel would stop us for touching it.
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return False
            settings = termios.tcgetattr(descriptor)
            was = bool(settings[_LOCAL_FLAGS] & termios.ECHOCTL)
            flags = settings[_LOCAL_FLAGS] & ~termios.ECHOCTL
            settings[_LOCAL_FLAGS] = flags | termios.ECHOCTL if wanted else flags
            termios.tcsetattr(descriptor, termios.TCSANOW, settings)
            return was
        finally:
            os.close(descriptor)
    return False
