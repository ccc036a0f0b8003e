"""The machine's ledger as metrics for Prometheus: GPU hours and energy by user and GPU, who holds what now, and who
waits for how many.

Served by ``gpuherd record --prometheus``. docs/grafana.json is a dashboard of them. Jobs, projects and commands are not
named: names would be endless labels. Imported only for that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric

from gpuherd import __version__
from gpuherd.gpus.lease_files import user_name
from gpuherd.jobs.monitor.prometheus import counter, gauge, text_of
from gpuherd.jobs.monitor.turns import WaitingUser, read_line, waiting_users
from gpuherd.ledger.fold import Fold
from gpuherd.ledger.reader import Ledger
from gpuherd.ledger.records import Use

# Whose use of which GPU: uid, label, UUID.
_Key = tuple[int, str, str]
# A record that is older is of a recorder that hangs.
_FRESH_S = 60.0


def _figures(use: Use) -> tuple[_Key, tuple[float, ...]]:
    computing_s = use.computing_s or 0.0
    idle_s = 0.0 if use.computing_s is None else max(0.0, use.held_s - computing_s)
    return (use.uid, use.label, use.gpu), (use.held_s, computing_s, idle_s, use.energy_j or 0.0)


def reader_of(find: Callable[[], Ledger | None] = Ledger.existing) -> Callable[[], str]:
    """A function that returns the metrics' text by now, and reads only what is new. ``find``: the ledger, which may be
    made later."""
    fold: Fold[_Key] | None = None
    largest: dict[_Key, tuple[float, ...]] = {}

    def read() -> str:
        nonlocal fold
        ledger = find() if fold is None else fold.ledger
        if ledger is not None and fold is None:
            fold = Fold(ledger, _figures)
        sums = {} if fold is None else fold.sums()
        for key, figures in sums.items():
            # A counter that goes back a little is a restart from nothing to Prometheus.
            before = largest.get(key, figures)
            largest[key] = tuple(map(max, figures, before))
        opened = [] if fold is None else fold.open_records()
        now = time.time()
        going_on = [each.use for each in opened if each.is_open and abs(now - each.use.until) < _FRESH_S]
        return text_of((*_families(largest, going_on), *_waiting(waiting_users(read_line()))))

    return read


def _waiting(users: Sequence[WaitingUser]) -> Iterator[Metric]:
    text = "GPUs that a user's gpuherds could put to use now, and wait for."
    yield gauge("machine_gpus_wanted", text, [(each.user, each.gpus) for each in users], "user")
    text = "For how long the user has waited for a GPU."
    yield gauge("machine_waiting_seconds", text, [(each.user, each.waited_s) for each in users], "user")


def _families(sums: dict[_Key, tuple[float, ...]], going_on: list[Use]) -> Iterator[Metric]:
    yield gauge("machine_info", "Which gpuherd records.", [(__version__, 1.0)], "version")
    labels = ("user", "gpu", "uuid")
    ordered = [((user_name(uid), label, uuid), figures) for (uid, label, uuid), figures in sorted(sums.items())]
    texts = (
        ("machine_gpu_held_seconds", "Time that a user held the GPU; shared ones in parts."),
        ("machine_gpu_computing_seconds", "Of this the time in which it computed: its utilisation, summed."),
        ("machine_gpu_idle_seconds", "Of this the time in which it was measured not to compute."),
        ("machine_gpu_energy_joules", "Energy that the GPU took meanwhile."),
    )
    for position, (name, text) in enumerate(texts):
        yield counter(name, text, [(*key, figures[position]) for key, figures in ordered], *labels)
    held: dict[str, set[str]] = defaultdict(set)
    idle: dict[str, set[str]] = defaultdict(set)
    memory: dict[tuple[str, str], float] = defaultdict(float)
    for use in going_on:
        user = user_name(use.uid)
        held[user].add(use.gpu)
        if use.idle_since is not None:
            idle[user].add(use.gpu)
        memory[user, use.label] += use.peak_mb or 0
    text = "GPUs that a user's jobs and processes are on now."
    yield gauge("machine_gpus_held", text, [(user, len(gpus)) for user, gpus in sorted(held.items())], "user")
    text = "Of these the GPUs whose memory is held without computing."
    yield gauge("machine_gpus_idle", text, [(user, len(idle[user])) for user in sorted(held)], "user")
    text = "The most memory that what runs now has used, summed over its uses."
    samples = [(*key, mb * 2**20) for key, mb in sorted(memory.items())]
    yield gauge("machine_gpu_peak_memory_bytes", text, samples, "user", "gpu")
