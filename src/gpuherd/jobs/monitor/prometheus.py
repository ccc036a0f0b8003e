"""Metrics for Prometheus: the queue's figures in its text format, served on 127.0.0.1 by a thread of their own.

Each answer is read afresh from the queue's file through a read-only connection, so that a scrape can't hold the
dispatcher up and a defect here can't harm it. Format: https://prometheus.io/docs/instrumenting/exposition_formats/
(text, version 0.0.4). Jobs are counted, never named: names would be endless labels, and are nobody else's business.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError
from gpuherd.jobs.monitor.metrics import Figures, Spread, read_figures
from gpuherd.jobs.monitor.status import opened
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 10.0
# Each connection costs the dispatcher a thread and a descriptor, and jobs need descriptors to start.
_MOST_CONNECTIONS = 16
_INDEX = "gpuherd: metrics are at /metrics\n"


def exposition(figures: Figures, folder: str) -> str:
    """The figures as Prometheus reads them. ``folder`` names the queue."""
    return "".join(_lines(figures, folder))


def _lines(figures: Figures, folder: str) -> Iterator[str]:
    counts = figures.counts
    yield from _metric(
        "info", "gauge", "Which gpuherd and which queue this is.", [({"version": __version__, "queue": folder}, 1)]
    )
    yield from _metric(
        "dispatcher_up", "gauge", "Whether a dispatcher works on the queue.", [({}, int(figures.at_work))]
    )
    by_state = {
        "waiting": counts.waiting,
        "running": counts.running,
        "done": counts.done,
        "failed": counts.failed,
        "cancelled": counts.cancelled,
    }
    yield from _metric("jobs", "gauge", "Jobs of the queue by state.", [({"state": s}, n) for s, n in by_state.items()])
    yield from _metric("jobs_paused", "gauge", "Jobs that were told to pause.", [({}, figures.paused)])
    if figures.in_engine is not None:
        there, at = figures.in_engine, {"engine": figures.in_engine.engine}
        by_phase = [({**at, "phase": "in_line"}, there.in_line), ({**at, "phase": "begun"}, there.jobs - there.in_line)]
        yield from _metric(
            "jobs_in_engine", "gauge", "Running jobs that an engine beyond this machine has, by phase.", by_phase
        )
    if figures.eta_s is not None:
        yield from _metric(
            "remaining_seconds", "gauge", "Time until all jobs are done, estimated.", [({}, figures.eta_s)]
        )
    ended = sorted(figures.ended.items())
    yield from _metric(
        "attempts_total",
        "counter",
        "Attempts that have ended, by outcome and class of failure.",
        [({"outcome": state, "class": failure}, n) for (state, failure), n in ended],
    )
    yield from _summary("job_wait_seconds", "Time in which an attempt could have run and did not.", figures.wait)
    yield from _summary("job_run_seconds", "Time that a successful attempt ran.", figures.run)
    yield from _metric(
        "gpu_held_seconds_total",
        "counter",
        "Time that attempts which have ended held GPUs, by outcome, summed over GPUs.",
        [({"outcome": state}, seconds) for state, seconds in sorted(figures.gpu_s_by_state.items())],
    )
    gpus = sorted(figures.gpus.items(), key=lambda each: each[1].label)
    for name, kind, text, of in (
        ("gpu_busy_seconds_total", "counter", "Time that jobs of this queue held the GPU, summed over jobs.", "busy_s"),
        ("gpu_attempts_total", "counter", "Attempts that were begun on the GPU.", "attempts"),
        ("gpu_running_jobs", "gauge", "Jobs of this queue on the GPU now.", "running"),
    ):
        samples = [({"gpu": gpu.label, "uuid": uuid}, getattr(gpu, of)) for uuid, gpu in gpus]
        yield from _metric(name, kind, text, samples)


def _metric(name: str, kind: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    if samples:
        yield f"# HELP gpuherd_{name} {text}\n# TYPE gpuherd_{name} {kind}\n"
    for labels, value in samples:
        yield _sample(name, labels, value)


def _summary(name: str, text: str, spread: Spread) -> Iterator[str]:
    yield f"# HELP gpuherd_{name} {text}\n# TYPE gpuherd_{name} summary\n"
    for quantile, value in spread.quantiles.items():
        yield _sample(name, {"quantile": str(quantile)}, value)
    yield _sample(f"{name}_sum", {}, spread.total)
    yield _sample(f"{name}_count", {}, spread.count)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(word)}"' for key, word in labels.items())
    return f"gpuherd_{name}{{{told}}} {value:.10g}\n" if told else f"gpuherd_{name} {value:.10g}\n"


def _escaped(word: str) -> str:
    plain = word.encode("utf-8", "backslashreplace").decode()
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def never_less(figures: Figures, told: dict[str, float]) -> Figures:
    """The figures with each GPU's busy seconds at least what was ``told`` of it before, which is kept up to date.

    A job counts up to now until its end is recorded, which lies a moment before: to Prometheus a counter that goes
    back by a millisecond has begun anew from nothing, and all that it had counted would be counted again.
    """
    for uuid, gpu in figures.gpus.items():
        told[uuid] = max(gpu.busy_s, told.get(uuid, 0.0))
    return replace(figures, gpus={uuid: replace(gpu, busy_s=told[uuid]) for uuid, gpu in figures.gpus.items()})


class MetricsServer:
    """Serves a run's metrics while the context lasts. ``port`` is the one it listens on.

    Raises UsageError when the port is taken.
    """

    def __init__(self, run: RunDirectory, port: int):
        told: dict[str, float] = {}

        def read() -> str:
            with opened(run) as reader:
                return exposition(never_less(read_figures(run, reader), told), str(run.root))

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
        """Stops listening. An answer that is under way is not waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """A thread a connection, and few of them: when one more comes, the oldest is cut off. A scrape takes milliseconds,
    so that is a client which dribbles, or says nothing.
    """

    daemon_threads = True
    request_queue_size = 64
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self._open: list[socket.socket] = []
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the look-up of this host's name, which the base class does and which can take seconds."""
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
        """A client that goes away in the middle is none of the run's business."""
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
