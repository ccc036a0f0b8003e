"""What a run tells beyond its own terminal and files: metrics for Prometheus, and notices. Begun and ended here.

Each is imported only when it is asked for: a run without them pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.jobs.events import Event
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.rundir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.jobs.notify import Notifier
    from gpuherd.jobs.prometheus import MetricsServer


class Outward:
    """A context around a run. Raises UsageError for a command or an address that could never work, and on entering for
    a port that is taken.
    """

    def __init__(self, run: RunDirectory, options: DispatchOptions):
        self._run = run
        self._port = options.prometheus
        self._server: MetricsServer | None = None
        self._notifier: Notifier | None = None
        self._outcome: Outcome | None = None
        if options.notify_command or options.webhook:
            from gpuherd.jobs.notify import Notifier, Ways

            self._notifier = Notifier(Ways.of(options.notify_command, options.webhook), str(run.root))

    def and_to(self, on_event: Callable[[Event], None] | None) -> Callable[[Event], None] | None:
        """A listener that passes events on to the notices and to this one."""
        notifier = self._notifier
        if notifier is None:
            return on_event

        def both(event: Event) -> None:
            notifier.event(event)
            if on_event is not None:
                on_event(event)

        return both

    def ended(self, outcome: Outcome) -> Outcome:
        """Takes note of how the run has ended, and gives it back."""
        self._outcome = outcome
        return outcome

    def __enter__(self) -> Outward:
        if self._port is not None:
            from gpuherd.jobs.prometheus import MetricsServer

            self._server = MetricsServer(self._run, self._port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        # Who called it wrongly sits in front of it.
        if self._notifier is not None and not isinstance(error, UsageError):
            self._notifier.close(self._outcome)
