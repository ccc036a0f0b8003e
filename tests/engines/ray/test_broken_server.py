"""A job server that stops taking jobs in the middle of a batch, or answers with nonsense."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpuherd.engines.base import Batch, EngineAway, Parcel, Placement, Refused
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.ray.cluster import resolve
from gpuherd.engines.ray.engine import Setup
from gpuherd.engines.ray.job_server import JobServer
from gpuherd.jobs.remote.agent import join, lead


@contextmanager
def server(takes: int = 0, jobs: tuple[int, str] = (500, "Traceback: the job manager is overloaded")) -> Iterator[str]:
    """The address of one that takes so many jobs, and then breaks. ``jobs``: its answer to how all of them stand."""
    taken: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/jobs/"):
                self._tell(*jobs)
                return
            self._tell(200, json.dumps({"version": "4", "ray_version": "2.0", "ray_commit": ""}))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
            if len(taken) == takes:
                self._tell(500, "Traceback: the job manager is overloaded")
                return
            taken.append(asked["submission_id"])
            self._tell(200, json.dumps({"job_id": taken[-1], "submission_id": taken[-1]}))

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

        def _tell(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_address[1]}"
        finally:
            found.shutdown()
            thread.join()


@pytest.mark.parametrize("takes", [0, 2])
def test_only_a_batch_of_which_nothing_was_taken_is_refused(tmp_path: Path, takes: int) -> None:
    """Else those that were taken would run, and others in their place once more."""
    parcels = tuple(Parcel(attempt=number, title=f"j{number}") for number in range(4))
    batch = Batch(
        name="gpuherd-1-1", placement=Placement(gpus=0), parcels=parcels, command=("lead", "batch"), folder=tmp_path
    )
    with (
        server(takes) as address,
        pytest.raises(EngineAway if takes else Refused, match=r"overloaded( \(it has taken 2 jobs of a batch\))?$"),
    ):
        joined(address).submit(batch)


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        (500, "Traceback: the GCS is restarting", "the GCS is restarting"),
        (200, '[{"type": "SUBMISSION", "status": "DANCING"}]', r"is not understood \(ValidationError\)"),
        (200, '["unheard of"]', r"is not understood \(TypeError\)"),
        (200, "<html>", "does not answer"),
    ],
)
def test_answers_that_mean_nothing_are_an_engine_that_is_away(code: int, text: str, told: str) -> None:
    """As a head that starts again gives them; the follower asks later, and ends nothing for them."""
    with server(jobs=(code, text)) as address:
        office = joined(address)
        with pytest.raises(EngineAway, match=told):
            office.look(("gpuherd-1-1-0",))


def test_a_job_that_can_not_be_cancelled_now_is_cancelled_later() -> None:
    with server() as address, pytest.raises(EngineAway, match="overloaded"):
        joined(address).cancel(("gpuherd-1-1-0",))


def joined(address: str) -> JobServer:
    """A connection to it."""
    options = EngineOptions(engine="ray", ray_address=address)
    return JobServer(
        Setup(address=resolve(options.ray_address, {}), lead=lead, join=join, resources={}, notice_s=options.notice)
    )
