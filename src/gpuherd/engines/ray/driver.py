"""The process beside Ray: ``python -m gpuherd.engines.ray.driver DESCRIPTOR``. It answers the follower's questions over
a socket until that is closed, which it also is when the follower dies.
"""

from __future__ import annotations

import signal
import sys
import traceback
from multiprocessing.connection import Connection

from gpuherd.engines.ray.address import Kind
from gpuherd.engines.ray.messages import (
    Answer,
    Cancel,
    Check,
    Look,
    Office,
    Problem,
    Question,
    Setup,
    Submit,
    problem_of,
)
from gpuherd.errors import GpuherdError


def serve(connection: Connection) -> None:
    """Answers until the follower has gone; then leaves Ray as it was found."""
    office: Office | None = None
    try:
        while True:
            try:
                question: Question = connection.recv()
            except (EOFError, OSError):
                return
            reply: Answer | Problem
            try:
                if isinstance(question, Setup):
                    office = _open(question)
                    reply = Answer(None)
                elif office is not None:
                    reply = Answer(_answer(office, question))
                else:
                    reply = Problem("bug", "it was asked before it was set up")
            except GpuherdError as problem:
                reply = problem_of(problem)
            except Exception:
                reply = Problem("bug", traceback.format_exc())
            try:
                connection.send(reply)
            except OSError:
                return
    finally:
        if office is not None:
            office.close()


def _answer(office: Office, question: Question) -> object:
    match question:
        case Check(placements):
            return office.check(placements)
        case Submit(batch):
            return office.submit(batch)
        case Look(handles):
            return office.look(handles)
        case Cancel(handles):
            office.cancel(handles)
            return None
    raise AssertionError(f"no question: {question!r}")


def _open(setup: Setup) -> Office:
    if setup.address.kind is Kind.SERVER:
        from gpuherd.engines.ray.job_server import JobServer

        return JobServer(setup)
    from gpuherd.engines.ray.tasks import Tasks

    return Tasks(setup)


def main() -> None:
    """The command."""
    # What ends the follower is seen as the end of the socket; then Ray is still there to be left in order.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
