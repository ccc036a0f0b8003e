"""``run_jobs``: submits jobs to the queue of a run folder and works it off; what experiments call."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuherd.atomic import atomic_write
from gpuherd.errors import Enqueued, GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts import GRACE_S
from gpuherd.jobs.attempts.complete import give_up
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.dispatcher import Dispatcher
from gpuherd.jobs.event_loop import Loop, Terms
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.monitor.metrics import gpu_metrics
from gpuherd.jobs.monitor.status import opened as opened_for_reading
from gpuherd.jobs.monitor.status import read_counts
from gpuherd.jobs.options import DispatchOptions, GpuOptions, dispatch_options
from gpuherd.jobs.queue.interventions import SubmissionChanges
from gpuherd.jobs.queue.schema import raising_cannot_write
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Counts, Event, Outcome, QueuedJob
from gpuherd.jobs.remote.dispatcher import opened, refuse_other_engine, remember, settled
from gpuherd.jobs.reporter import Display, Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.settings import load

if TYPE_CHECKING:
    from gpuherd.jobs.monitor.notify import Notifier

logger = logging.getLogger(__name__)


def run_jobs(
    jobs: Sequence[Job],
    options: GpuOptions,
    run: RunDirectory,
    *,
    rerun: Collection[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    before: Callable[[], None] = lambda: None,
    on_event: Callable[[Event], None] | None = None,
    display: Display | None = None,
    grace_s: float = GRACE_S,
    enqueue_only: bool = False,
) -> Outcome:
    """Runs the jobs on free GPUs of this machine until none is left, and writes gpu_metrics.json.

    Called again with the same jobs and folder it goes on: jobs that are done stay done while their ``result`` exists
    (but those named in ``rerun``), those that failed or were cancelled get fresh tries, with a notice, and those that
    a dead run left running are taken over. Where the last call never ended, as after a kill, it is continued: failed
    and cancelled jobs stay so, and tries continue to count. The first Ctrl-C lets running jobs end and starts no more;
    the second, or SIGTERM, stops them and puts them back in the queue.

    Args:
        jobs: all the work; waiting jobs of earlier calls that are not among them are cancelled.
        options: GPUs to use, and when one counts as free.
        run: the run folder, made if it is not there.
        refused: of these jobs those that can't run, by name, with the reason: they fail without an attempt.
        before: called when no other dispatcher can begin here and nothing refuses the start any more, before the queue
            is changed; it is the last that can raise an error.
        on_event: called in this thread for everything that happens; it should be quick.
        display: what shows the run to people (``gpuherd.jobs.monitor.display.display``).
        grace_s: seconds that a job has to end after SIGTERM, before SIGKILL.
        enqueue_only: put the jobs into the queue and raise Enqueued: another call, or ``work_off``, runs them.

    Raises:
        CannotWrite: the folder can't be written.
        QueueBusy: another process works on this folder.
        QueueUnreadable: its queue is damaged or of a newer gpuherd.
        UsageError: two jobs with one name, or ``needs`` that name no job or go in a circle.
        NoSuchGpu: a GPU id that is not there. JobCannotFit: no job could ever run here.

    A start that is refused has changed nothing in the queue.
    """

    def prepare(queue: Queue) -> SubmissionChanges:
        before()
        return queue.submit(jobs, rerun)

    if enqueue_only:
        raise _enqueued(run, options, prepare, refused)
    return _run(
        run,
        options,
        display,
        on_event,
        prepare=prepare,
        jobs=jobs,
        refused=refused,
        grace_s=grace_s,
    )


def work_off(
    run: RunDirectory,
    options: GpuOptions,
    *,
    serve: bool = False,
    on_event: Callable[[Event], None] | None = None,
    display: Display | None = None,
    on_ready: Callable[[], None] = lambda: None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Works off the queue of a run folder (``Queue.add``) as it is, and writes gpu_metrics.json.

    ``serve``: stays when nothing is left, and waits for more (``Queue.add``, then ``poke``), until ``send`` or a signal
    ends it. ``on_ready`` is called once it works and serves requests. The rest is as for ``run_jobs``; NoSuchGpu is
    raised at once, even if no job needs a GPU for days.
    """
    return _run(run, options, display, on_event, serve=serve, on_ready=on_ready, grace_s=grace_s)


def _enqueued(
    run: RunDirectory, options: GpuOptions, prepare: Callable[[Queue], SubmissionChanges], refused: Mapping[str, str]
) -> Enqueued:
    """Puts the jobs into the queue; what to raise then."""
    run.create()
    with (
        closing(DispatcherLock(run.lock)),
        Queue(run.queue) as queue,
        raising_cannot_write(run.queue, "give the same command again"),
    ):
        refuse_other_engine(queue, run, dispatch_options(options))
        submitted = prepare(queue)
        for queued, reason in _that_wait(queue, refused):
            queue.fail_waiting(queued.id, reason)
        return Enqueued(run.root, queue.counts().waiting, submitted.remarks)


def _run(
    run: RunDirectory,
    options: GpuOptions,
    display: Display | None,
    on_event: Callable[[Event], None] | None,
    *,
    prepare: Callable[[Queue], SubmissionChanges] = lambda _: SubmissionChanges(),
    jobs: Sequence[Job] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    serve: bool = False,
    on_ready: Callable[[], None] = lambda: None,
    grace_s: float,
) -> Outcome:
    """One dispatcher's life. ``prepare`` changes the queue when all is there that could refuse the start."""
    run.create()
    chosen = dispatch_options(options)
    notifier = _notifier(run, chosen, serve=serve)
    listeners: list[Callable[[Event], None]] = [] if notifier is None else [notifier.event]
    if on_event is not None:
        listeners.append(on_event)
    with (
        closing(DispatcherLock(run.lock)) as lock,
        Queue(run.queue) as queue,
        # What was recorded stays, running jobs go on, and the next start takes them over.
        raising_cannot_write(run.queue, "start the same command again to go on"),
    ):
        reporter = Reporter(queue, run, display, listeners)
        if not serve:
            states = queue.states()
            left = [job for job in jobs if job.name not in refused and states.get(job.name) is not JobState.DONE]
            chosen = settled(left, chosen, run)
        refuse_other_engine(queue, run, chosen)
        with ExitStack() as services:
            if notifier is not None:
                services.enter_context(notifier)
            if chosen.prometheus is not None:
                from gpuherd.jobs.monitor.prometheus import MetricsServer

                services.enter_context(MetricsServer(run, chosen.prometheus))
            engine = services.enter_context(opened(chosen))
            settings = load()
            terms = Terms(
                serve=serve,
                lock=lock,
                settings=settings,
                load_settings=load,
                on_ready=on_ready,
                grace_s=grace_s,
            )
            worker: Loop
            if engine is None:
                worker = Dispatcher(queue, run, chosen, reporter, jobs, **terms)
            else:
                from gpuherd.jobs.remote.dispatcher import RemoteDispatcher

                worker = RemoteDispatcher(queue, run, chosen, engine, reporter, jobs, **terms)
                remember(run, chosen)
            submitted = prepare(queue)
            for remark in (*settings.warnings, *submitted.remarks):
                reporter.notice(remark)
            for queued, reason in _that_wait(queue, refused):
                problem = give_up(queue, reporter, [queued], FailureClass.BAD_INPUT, reason)
                if problem is not None:
                    raise problem
            try:
                outcome = worker.run()
            finally:
                write_metrics(queue, run)
            if notifier is not None:
                notifier.outcome = outcome
            return outcome


def _notifier(run: RunDirectory, options: DispatchOptions, *, serve: bool) -> Notifier | None:
    """What sends the run's notices, None where the options ask for none. Raises UsageError for a command or an address
    that could never work."""
    if not (options.notify_command or options.webhook):
        return None
    from gpuherd.jobs.monitor.notify import Channels, Notifier

    def counts() -> Counts:
        with opened_for_reading(run) as reader:  # in the notifier's thread
            return read_counts(reader)

    channels = Channels.of(options.notify_command, options.webhook)
    return Notifier(channels, str(run.root), counts if serve else None)


def _that_wait(queue: Queue, refused: Mapping[str, str]) -> Iterator[tuple[QueuedJob, str]]:
    """Those of the refused jobs that have not ended in an earlier call, with the reason."""
    for name, reason in refused.items():
        found = queue.job(name)
        if found is not None and found[1] is JobState.WAITING:
            yield found[0], reason


def write_metrics(queue: Queue, run: RunDirectory) -> None:
    """Writes gpu_metrics.json. A failure is only logged: nothing else depends on the file."""
    try:
        with opened_for_reading(run) as reader:
            figures = gpu_metrics(run, reader, queue.runs(), clock.wall())
        atomic_write(run.gpu_metrics, json.dumps(figures, indent=2).encode() + b"\n")
    except (OSError, GpuherdError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        logger.warning("can't write %s: %s", run.gpu_metrics, why)
