"""Serves a queue's metrics to Prometheus on 127.0.0.1, in a thread, while a run lasts.

Each answer is read afresh from the queue's file through a read-only connection, so that a scrape can't hold the
dispatcher up and a defect here can't harm it. The text is prometheus_client's: version 0.0.4 of
https://prometheus.io/docs/instrumenting/exposition_formats/. Jobs are counted and never named: names would be endless
labels, and are private. Imported only for a run with --prometheus.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError
from gpuherd.jobs.monitor.metrics import Durations, Metrics, read_metrics
from gpuherd.jobs.monitor.status import opened
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 10.0
# Each connection costs the dispatcher a thread and a descriptor, and jobs need descriptors to start.
_MOST_CONNECTIONS = 16
_INDEX = "gpuherd: metrics are at /metrics\n"
_QUANTILES = (50, 90, 95, 99)


def exposition(metrics: Metrics) -> str:
    """The metrics as Prometheus reads them."""
    return text_of(_families(metrics))


def _families(metrics: Metrics) -> Iterator[Metric]:
    """The metric families of one answer, in the order of the text."""
    status = metrics.status
    queue = str(status.folder).encode("utf-8", "backslashreplace").decode()
    info = [(__version__, queue, 1.0)]
    yield gauge("info", "Which gpuherd and which queue this is.", info, "version", "queue")
    yield gauge("dispatcher_up", "Whether a dispatcher works on the queue.", [(status.dispatcher is not None,)])
    yield gauge("jobs", "Jobs of the queue by state.", asdict(status.counts).items(), "state")
    yield gauge("jobs_paused", "Jobs that are paused.", [(status.paused,)])
    if (there := status.in_engine) is not None:
        phases = ((there.engine, "in_line", there.in_line), (there.engine, "begun", there.jobs - there.in_line))
        text = "Running jobs that an engine beyond this machine has, by phase."
        yield gauge("jobs_in_engine", text, phases, "engine", "phase")
    if status.eta_s is not None:
        yield gauge("remaining_seconds", "Time until all jobs are done, estimated.", [(status.eta_s,)])
    ended = ((*key, number) for key, number in sorted(metrics.ended.items()))
    text = "Attempts that have ended, by outcome and class of failure."
    yield counter("attempts", text, ended, "outcome", "class")
    yield _summary("job_wait_seconds", "Time in which an attempt could have run and did not.", metrics.wait)
    yield _summary("job_run_seconds", "Time that a successful attempt ran.", metrics.run)
    text = "Time that attempts which have ended held GPUs, by outcome, summed over GPUs."
    yield counter("gpu_held_seconds", text, sorted(metrics.gpu_s_by_state.items()), "outcome")
    gpus = [(gpu.label, uuid, gpu) for uuid, gpu in sorted(metrics.gpus.items(), key=lambda each: each[1].label)]
    text, labels = "Time that jobs of this queue held the GPU, summed over jobs.", ("gpu", "uuid")
    yield counter("gpu_busy_seconds", text, [(label, uuid, gpu.busy_s) for label, uuid, gpu in gpus], *labels)
    text, attempts = "Attempts that were begun on the GPU.", [(*key, gpu.attempts) for *key, gpu in gpus]
    yield counter("gpu_attempts", text, attempts, *labels)
    text, running = "Jobs of this queue on the GPU now.", [(*key, gpu.running) for *key, gpu in gpus]
    yield gauge("gpu_running_jobs", text, running, *labels)


def text_of(families: Iterable[Metric]) -> str:
    """Families of metrics as Prometheus reads them, without those that have no samples."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(tuple(families)))
    return generate_latest(registry).decode()


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._families if family.samples)


def gauge(name: str, text: str, samples: Iterable[tuple[Any, ...]], *labels: str) -> Metric:
    """A gauge ``gpuherd_<name>``; ``samples``: for each its labels and its value."""
    family = GaugeMetricFamily(f"gpuherd_{name}", text, labels=labels)
    for *key, value in samples:
        family.add_metric(key, value)
    return family


def counter(name: str, text: str, samples: Iterable[tuple[Any, ...]], *labels: str) -> Metric:
    """The same for a counter."""
    family = CounterMetricFamily(f"gpuherd_{name}", text, labels=labels)
    for *key, value in samples:
        family.add_metric(key, value)
    return family


def _summary(name: str, help_text: str, values: Durations) -> Metric:
    family = SummaryMetricFamily(f"gpuherd_{name}", help_text)
    for percent in _QUANTILES if values.ordered else ():
        family.add_sample(f"gpuherd_{name}", {"quantile": str(percent / 100)}, values.quantile(percent))
    family.add_sample(f"gpuherd_{name}_sum", {}, sum(values.ordered))
    family.add_sample(f"gpuherd_{name}_count", {}, len(values.ordered))
    return family


class TextServer:
    """Serves a text of metrics while the context lasts. ``port`` is the one it listens on.

    Args:
        read: the text, made afresh for each answer, one at a time.
        port: 0 for any that is free.

    Raises UsageError when the port is taken.
    """

    def __init__(self, read: Callable[[], str], port: int):
        try:
            self._server = _Server(("127.0.0.1", port), _handler(read))
        except OSError as problem:
            raise UsageError(
                f"can't serve metrics on port {port} of 127.0.0.1: {problem.strerror}; choose another (0 for any)"
            ) from problem
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpuherd-metrics", daemon=True)
        self._thread.start()
        logger.info("metrics for Prometheus: http://127.0.0.1:%s/metrics", self.port)

    def close(self) -> None:
        """Stops listening; does not wait for answers that are being sent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsServer(TextServer):
    """Serves a run's metrics."""

    def __init__(self, run: RunDirectory, port: int):
        busy_s: dict[str, float] = {}

        def read() -> str:
            with opened(run) as reader:
                metrics = read_metrics(run, reader)
            # A running job counts up to now, and an end is recorded a moment after it: the counter would go back by a
            # millisecond, which to Prometheus is a restart from nothing.
            for uuid, gpu in metrics.gpus.items():
                busy_s[uuid] = max(gpu.busy_s, busy_s.get(uuid, 0.0))
                gpu.running_s = busy_s[uuid] - gpu.ended_s
            return exposition(metrics)

        super().__init__(read, port)


class _Server(ThreadingHTTPServer):
    """A thread per connection, and at most 16 of them: when one more comes, the oldest is closed. A scrape takes
    milliseconds, so the oldest is a client that sends slowly, or nothing.
    """

    daemon_threads = True
    request_queue_size = 64
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self._open: list[socket.socket] = []
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Binds without the base class's look-up of this host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a connection's thread."""
        with self._guard:
            self._open.append(request)
            if len(self._open) > _MOST_CONNECTIONS:
                with suppress(OSError):
                    self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection, in its thread."""
        with self._guard, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as the base class calls it
        """A client that goes away in the middle is no problem of the run."""
        logger.debug("a request for metrics from %s broke off", client_address, exc_info=True)


def _handler(read: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    # One at a time: ten scrapers at once must not cost ten reads at once.
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S
        server_version = f"gpuherd/{__version__}"
        sys_version = ""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                try:
                    with turn:
                        text = read()
                except (GpuherdError, OSError) as problem:
                    self._answer(503, f"{problem}\n", "text/plain; charset=utf-8")
                    return
                self._answer(200, text, CONTENT_TYPE)
            else:
                self._answer(200 if path == "/" else 404, _INDEX, "text/plain; charset=utf-8")

        def _answer(self, code: int, text: str, kind: str) -> None:
            data = text.encode("utf-8", "backslashreplace")
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class calls it
            logger.debug(format, *args)

    return Handler
