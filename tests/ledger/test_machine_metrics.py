"""The ledger as metrics for Prometheus, and the dashboard that shows them."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.ledger.uses import use

from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.tickets import Need, OwnTicket
from gpuherd.jobs import clock
from gpuherd.jobs.monitor.machine_metrics import reader_of
from gpuherd.jobs.monitor.prometheus import TextServer
from gpuherd.ledger.reader import Ledger
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import Use

ME = os.geteuid()
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "ledger"
    place.mkdir()
    return place


def one(name: str = "a", **fields: object) -> Use:
    now = time.time()
    plain = use(name, uid=ME, since=now - 100, held_s=100.0, computing_s=40.0, energy_j=5_000.0, peak_mb=1024)
    return replace(plain, **fields)  # type: ignore[arg-type]


def samples(read: Callable[[], str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(read()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


def test_sums_and_what_goes_on(folder: Path) -> None:
    read = reader_of(lambda: Ledger(folder, shared=False))
    assert samples(read).keys() == {"gpuherd_machine_info"}
    recorder = Recorder(folder)
    recorder.begin()
    recorder.end([one("a")])
    idle = one("b", gpu="GPU-1", label="1", idle_since=time.time() - 50, computing_s=None)
    recorder.sample([idle])
    found = samples(read)
    assert found["gpuherd_machine_gpu_held_seconds_total"] == [100.0, 100.0]
    assert found["gpuherd_machine_gpu_computing_seconds_total"] == [40.0, 0.0]
    assert found["gpuherd_machine_gpu_idle_seconds_total"] == [60.0, 0.0]
    assert found["gpuherd_machine_gpu_energy_joules_total"] == [5000.0, 5000.0]
    assert found["gpuherd_machine_gpus_held"] == [1.0]
    assert found["gpuherd_machine_gpus_idle"] == [1.0]
    assert found["gpuherd_machine_gpu_peak_memory_bytes"] == [float(1 << 30)]
    recorder.close([replace(idle, held_s=99.9)])
    # A counter never goes back.
    assert samples(read)["gpuherd_machine_gpu_held_seconds_total"] == [100.0, 100.0]


def test_they_are_served(folder: Path) -> None:
    Recorder(folder).end([one()])
    with TextServer(reader_of(lambda: Ledger(folder, shared=False)), 0) as server:
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10).read().decode()
    assert "gpuherd_machine_gpu_held_seconds_total{" in text


def test_the_dashboard_names_only_metrics_and_labels_that_there_are(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.begin()
    recorder.end([one()])
    recorder.sample([one("b")])
    ticket = OwnTicket()
    ticket.keep(LeaseFolder.default().path, Need(gpus=3), clock.mono())
    text = reader_of(lambda: Ledger(folder, shared=False))()
    ticket.withdraw()
    recorder.close()
    assert any(line.startswith("gpuherd_machine_gpus_wanted{") and line.endswith(" 3.0") for line in text.splitlines())
    there = {name for family in text_string_to_metric_families(text) for name in [each.name for each in family.samples]}
    labels = {
        label for family in text_string_to_metric_families(text) for each in family.samples for label in each.labels
    }
    dashboard = json.loads(DASHBOARD.read_text())
    written = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    written += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    named = {name for expression in written for name in re.findall(r"gpuherd_\w+", expression)}
    assert named <= there
    # Every metric of use is shown.
    assert there - named == {"gpuherd_machine_info"}
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {word for legend in legends for word in re.findall(r"{{(\w+)}}", legend)} <= labels
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
