"""The machine's ledger: who used which GPU, for how long, for what. Append-only files that each user writes for
themself, in the folder that ``gpuherd.gpus.machine_dir`` names.

``records`` (a use as data, and as a line of a file), ``files`` (names, and reading what others have written),
``reader`` (``Ledger``), ``recorder`` (``Recorder``), ``metering`` (looks at GPUs become seconds and joules; pure),
``sampler`` (processes that no gpuherd records itself), ``fold`` (sums that are kept up to date), ``shares`` (how
much each user has used of late), ``usage`` (sums by user, project and the like; pure).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.ledger.reader import Ledger
    from gpuherd.ledger.recorder import Recorder
    from gpuherd.ledger.records import Kind, Recorded, Use
    from gpuherd.ledger.shares import Shares

__all__ = ["Kind", "Ledger", "Recorded", "Recorder", "Shares", "Use"]

_HOME_OF = {
    "Kind": "records",
    "Ledger": "reader",
    "Recorded": "records",
    "Recorder": "recorder",
    "Shares": "shares",
    "Use": "records",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME_OF)
