"""Other users' reservations in decisions, in a dispatcher and in ``gpuherd run``; one's own are used and marked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.test_policy import LARGE, gpu, jobs_strategy, limits_strategy, pick, started, views_strategy

from gpuherd.batch.options import RunOptions
from gpuherd.batch.run import NoGpuFree, Waiter
from gpuherd.errors import UsageError
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.machine_dir import ENVIRONMENT
from gpuherd.gpus.reservation_files import ReservationFolder
from gpuherd.gpus.reservations import ReservationLimits, ReservationRules, State
from gpuherd.jobs import GpuOptions, Job, RunDirectory, run_jobs
from gpuherd.jobs.attempts.supervise import Supervisor
from gpuherd.jobs.gpu.booking import CannotReserve, Request, choose_gpus
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.gpu.manager import GpuManager
from gpuherd.jobs.gpu.reserved import ReservedGpus, standings_now
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.scheduler.policy import decide
from gpuherd.jobs.scheduler.types import GpuView, Reserved, WaitingJob
from gpuherd.jobs.settings import NO_SETTINGS, Policy, Settings, load
from gpuherd.standin.machine import SimulatedMachine

HOUR = 3600.0
UID = os.geteuid()
OTHER = 65_534
needs_root = pytest.mark.skipif(UID != 0, reason="only root can become other users")


def reserved(in_s: float, unknown_s: float = 2 * HOUR) -> Reserved:
    return Reserved(in_s, unknown_s, "reserved by alice from Fri 18:00")


# --- decisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_s", "expected_s", "in_s", "overruns"),
    [
        (None, None, 3 * HOUR, False),
        (None, None, HOUR, True),
        (HOUR, None, HOUR, False),
        (HOUR + 1, None, HOUR, True),
        (24 * HOUR, None, 20 * HOUR, True),
        (24 * HOUR, HOUR, 20 * HOUR, False),
        (HOUR / 2, 5 * HOUR, HOUR, False),
        (None, HOUR, HOUR / 2, True),
        (1.0, 1.0, 0.0, True),
        (1.0, None, -5.0, True),
    ],
)
def test_which_jobs_overrun(limit_s: float | None, expected_s: float | None, in_s: float, overruns: bool) -> None:
    job = WaitingJob(1, 1, limit_s=limit_s, expected_s=expected_s)
    assert reserved(in_s).is_overrun_by(job) is overruns


@st.composite
def timed_jobs(draw: st.DrawFn) -> list[WaitingJob]:
    """Jobs of known and unknown length; some share."""
    lengths = st.sampled_from([None, 60.0, 5000.0])
    return [
        replace(
            job,
            limit_s=draw(lengths),
            expected_s=draw(lengths),
            share=job.gpus == 1 and job.memory_mb is not None and draw(st.booleans()),
        )
        for job in draw(jobs_strategy)
    ]


@st.composite
def reserved_views(draw: st.DrawFn) -> list[GpuView]:
    """GPUs, some of which others have reserved."""
    found = []
    for view in draw(views_strategy):
        in_s = draw(st.sampled_from([None, -10.0, 60.0, 600.0, 10_000.0]))
        found.append(view if in_s is None else replace(view, reserved=reserved(in_s)))
    return found


@given(timed_jobs(), reserved_views(), limits_strategy)
def test_no_job_starts_where_it_would_overrun(
    jobs: Sequence[WaitingJob], views: Sequence[GpuView], limits: object
) -> None:
    decision = decide(jobs, views, limits, pick)  # type: ignore[arg-type]
    by_id, by_uuid = {job.id: job for job in jobs}, {view.gpu.uuid: view for view in views}
    for start in decision.starts:
        for chosen in start.gpus:
            of = by_uuid[chosen.uuid].reserved
            assert of is None or not of.is_overrun_by(by_id[start.job])
    everyone = [start.job for start in decision.starts] + [w.job for w in (*decision.waits, *decision.refused)]
    assert sorted(everyone) == sorted(by_id)


@given(timed_jobs(), reserved_views(), limits_strategy)
def test_to_a_job_a_gpu_that_it_would_overrun_is_a_busy_one(
    jobs: Sequence[WaitingJob], views: Sequence[GpuView], limits: object
) -> None:
    for each in jobs:
        job = replace(each, avoid=frozenset())
        plain = [
            replace(
                view,
                reserved=None,
                busy="busy"
                if view.reserved is not None and view.reserved.is_overrun_by(job) and not view.ours
                else view.busy,
            )
            for view in views
        ]
        with_it, without = decide([job], views, limits, pick), decide([job], plain, limits, pick)  # type: ignore[arg-type]
        assert (with_it.starts, with_it.refused) == (without.starts, without.refused)


@given(timed_jobs(), views_strategy, limits_strategy)
def test_a_reservation_beyond_every_jobs_end_changes_nothing(
    jobs: Sequence[WaitingJob], views: Sequence[GpuView], limits: object
) -> None:
    far = [replace(view, reserved=reserved(1e6)) for view in views]
    with_it, without = decide(jobs, far, limits, pick), decide(jobs, views, limits, pick)  # type: ignore[arg-type]
    assert replace(with_it, backfill_s=None) == replace(without, backfill_s=None)


def test_a_reason_names_who_has_reserved_it_and_from_when() -> None:
    views = [GpuView(gpu(0), reserved=reserved(600.0)), GpuView(gpu(1), "alice runs python")]
    decision = decide([WaitingJob(1, 1)], views, LARGE, pick)
    assert decision.waits[0].reason == (
        "GPU 0: reserved by alice from Fri 18:00, and the job may still run then; GPU 1: alice runs python"
    )
    in_force = replace(views[0], busy="reserved by alice until Sun 18:00", reserved=replace(reserved(-1), sentence="R"))
    assert decide([WaitingJob(1, 1)], [in_force], LARGE, pick).waits[0].reason == "GPU 0: R"


def test_a_job_that_waits_for_a_reservation_to_end_keeps_no_gpu_from_smaller_ones() -> None:
    """Two GPUs are free, one is reserved soon: the job on two must not have the other kept for it."""
    views = [GpuView(gpu(0), reserved=reserved(600.0)), GpuView(gpu(1)), GpuView(gpu(2), "we", ours=True)]
    jobs = [WaitingJob(1, 3), WaitingJob(2, 1), WaitingJob(3, 1, limit_s=300.0)]
    decision = decide(jobs, views, LARGE, pick)
    assert {start.job: [each.uuid for each in start.gpus] for start in decision.starts} == {
        2: ["GPU-1"],
        3: ["GPU-0"],
    }


def test_a_gpu_it_failed_on_is_given_again_and_a_reserved_one_is_not() -> None:
    job = WaitingJob(1, 1, avoid=frozenset({"GPU-0"}))
    views = [GpuView(gpu(0)), GpuView(gpu(1), reserved=reserved(10.0))]
    assert [each.uuid for each in decide([job], views, LARGE, pick).starts[0].gpus] == ["GPU-0"]


def test_short_jobs_far_behind_are_looked_for_while_reserved_gpus_are_left() -> None:
    decision = decide([WaitingJob(1, 1)], [GpuView(gpu(0), reserved=reserved(600.0))], LARGE, pick)
    assert (decision.backfill_s, started(decision)) == (600.0, [])


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Policy]:
    def write(text: str) -> Policy:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        path.chmod(0o644)
        monkeypatch.setenv("GPUHERD_POLICY", str(path))
        return load().policy

    return write


def test_the_policys_table(policy: Callable[[str], Policy]) -> None:
    found = policy(
        '[limits]\nmax_gpus_per_user = 4\n[reservations]\nmax_gpus = 2\nmax_hours = 12\nmax_ahead = "7d"\n'
        'lapse_after = "10m"\nunknown_horizon = "0"\nenabled = false\n'
        "[users.alice]\nmax_gpus = 3\n[users.alice.reservations]\nmax_gpus = 8\n"
        '[users.bob.reservations]\nmax_hours = "3d"\n'
    )
    rules = found.reservation_rules
    assert (rules.enabled, rules.lapse_after_s, rules.unknown_horizon_s) == (False, 600.0, 0.0)
    assert rules.limits == ReservationLimits(2, 12 * HOUR, 7 * 24 * HOUR)
    # No more than she may hold.
    assert found.reservation_limits("alice") == ReservationLimits(3, 12 * HOUR, 7 * 24 * HOUR)
    assert found.reservation_limits("bob") == ReservationLimits(2, 72 * HOUR, 7 * 24 * HOUR)
    assert policy("").reservation_rules == ReservationRules()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[reservations]\nmax_gpu = 2", r"\[reservations\] max_gpu is no setting; did you mean max_gpus"),
        ('[reservations]\nlapse_after = "5s"', "lapse_after is below 60 s"),
        ("[reservations]\nenabled = 3", "enabled"),
        ("[reservations]\nmax_hours = -1", "max_hours"),
        ("[users.bob.reservations]\nlapse_after = 90", r"\[users.bob.reservations\] lapse_after is no setting"),
        ("[users.bob]\nreservations = 3", "reservations should be a table"),
    ],
)
def test_a_slip_in_the_policy_is_named(policy: Callable[[str], Policy], text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        policy(text)


# --- choosing -------------------------------------------------------------------------------------------------------


def choose(request: Request, settings: Settings = NO_SETTINGS, now: float = 1e9, count: int = 4) -> list[str]:
    found = standings_now(settings.policy, now)
    chosen = choose_gpus(request, [gpu(number) for number in range(count)], found, settings, uid=UID, now=now)
    return [each.label for each in chosen]


def test_what_can_be_reserved_and_why_not() -> None:
    now = 1e9
    plain = Request(2, now + HOUR, now + 2 * HOUR)
    assert choose(plain) == ["0", "1"]
    assert choose(replace(plain, gpus=0, gpu_ids=("3", "1"))) == ["3", "1"]
    with pytest.raises(CannotReserve, match="5 GPUs can't be reserved; this machine has 4"):
        choose(replace(plain, gpus=5))
    with pytest.raises(UsageError, match="in the past"):
        choose(replace(plain, since=now - HOUR))
    with pytest.raises(UsageError, match="ends before it begins"):
        choose(replace(plain, until=now))
    with pytest.raises(UsageError, match="lasts 8 d 0 h; at most 7 d 0 h are allowed"):
        choose(replace(plain, until=plain.since + 8 * 86400))
    with pytest.raises(UsageError, match="at most 28 d 0 h"):
        choose(replace(plain, since=now + 30 * 86400, until=now + 31 * 86400))
    kept = Settings(policy=Policy(exclude_gpus=("0",), max_gpus_per_user=2))
    assert choose(plain, kept) == ["1", "2"]
    with pytest.raises(UsageError, match="is for 3 GPUs; at most 2 are allowed"):
        choose(replace(plain, gpus=3), kept)
    with pytest.raises(UsageError, match="turned off"):
        choose(plain, Settings(policy=Policy(reservations=ReservationRules(enabled=False))))


def test_refused_with_who_has_what() -> None:
    now = time.time()
    folder = ReservationFolder.made()
    made = folder.add(["GPU-0", "GPU-1", "GPU-2"], now + HOUR, now + 3 * HOUR, "thesis")
    with pytest.raises(CannotReserve) as refused:
        choose(Request(2, now + 2 * HOUR, now + 4 * HOUR), now=now)
    assert "2 GPUs are not free from" in str(refused.value)
    assert "1 of 4 are; root has GPU 0, 1, 2 from" in str(refused.value) or UID != 0
    assert f"({made.id}, thesis)" in str(refused.value)
    assert choose(Request(2, now + 3 * HOUR, now + 4 * HOUR), now=now) == ["0", "1"]
    most = Settings(policy=Policy(reservations=ReservationRules(limits=ReservationLimits(max_gpus=3))))
    with pytest.raises(UsageError, match="would make 4 GPUs reserved by its owner at once; at most 3"):
        choose(Request(1, now + 2 * HOUR, now + 4 * HOUR), most, now=now)


# --- in force -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setenv(ENVIRONMENT, str(place))
    return place


def make_for_other(uuids: Sequence[str], since: float, until: float, folder: ReservationFolder, name: str = "") -> str:
    made = folder.add(uuids, since, until, name)
    for path in folder.path.glob(f"{made.id}.*"):
        renamed = path.with_name(path.name.replace(f"{UID}-", f"{OTHER}-", 1))
        path.rename(renamed)
        os.chown(renamed, OTHER, OTHER)
    return f"{OTHER}-{made.id.partition('-')[2]}"


FAST = GpuOptions(max_checks=1, check_interval=0.02)


def run(root: Path, count: int = 1, *, options: GpuOptions = FAST, **job: object) -> list[str]:
    """Runs jobs, and returns the GPUs on which each ran, in the order of their ends."""
    out = root.with_suffix(".out")
    words = ("/bin/sh", "-c", f'echo "$CUDA_VISIBLE_DEVICES" >>{out}; sleep 0.1')
    jobs = [Job(argv=words, name=f"j{number}", **job) for number in range(count)]  # type: ignore[arg-type]
    outcome = run_jobs(jobs, options, RunDirectory(root))
    assert outcome.exit_code == 0
    return out.read_text().split()


@needs_root
def test_jobs_of_another_keep_off_a_reserved_gpu_and_short_ones_use_it_before(
    shared: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    machine = standin("2x40GB")
    folder = ReservationFolder.made()
    now = time.time()
    make_for_other(machine.uuids[:1], now + HOUR, now + 3 * HOUR, folder)
    # Of unknown length: never on GPU 0.
    assert run(tmp_path / "unknown", 3) == ["1", "1", "1"]
    # Three like them have been short by now; a new queue knows nothing, but its jobs have a limit.
    assert sorted(run(tmp_path / "short", 2, timeout_s=600.0)) == ["0", "1"]
    assert run(tmp_path / "long", 2, timeout_s=2 * HOUR) == ["1", "1"]


@needs_root
def test_the_length_is_learnt(shared: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("2x40GB")
    now = time.time()
    make_for_other(machine.uuids[:1], now + HOUR, now + 3 * HOUR, ReservationFolder.made())
    # Once three are done, others like them may go to the reserved GPU too.
    assert "0" in run(tmp_path / "many", 12, family="alike")


@needs_root
def test_a_reservation_that_is_cancelled_lets_the_job_start(
    shared: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    machine = standin("1x40GB")
    folder, now = ReservationFolder.made(), time.time()
    identity = make_for_other(machine.uuids, now - 60, now + HOUR, folder, "thesis")
    told: list[str] = []

    def note(event: object) -> None:
        told.append(str(getattr(event, "text", "")))
        if any("reserved by" in text for text in told):
            (folder.path / f"{identity}.reservation").unlink(missing_ok=True)

    job = Job(argv=("true",), name="waits")
    outcome = run_jobs([job], FAST, RunDirectory(tmp_path / "run"), on_event=note)
    assert outcome.exit_code == 0
    assert any("reserved by" in text and "(thesis)" in text for text in told)


@needs_root
def test_the_owners_jobs_prefer_their_reservation_and_mark_it(
    shared: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    machine = standin("4x40GB")
    folder, now = ReservationFolder.made(), time.time()
    folder.add(machine.uuids[2:3], now - 60, now + HOUR)
    assert run(tmp_path / "mine") == ["2"]
    (mark,) = folder.read()
    assert mark.used is not None
    assert mark.used >= now - 1
    assert "2" in run(tmp_path / "two", gpus=2)[0].split(",")


@needs_root
def test_gpuherd_run_keeps_off_too(shared: Path, standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("2x40GB")
    folder, now = ReservationFolder.made(), time.time()
    make_for_other(machine.uuids[:1], now + HOUR, now + 3 * HOUR, folder)
    options = RunOptions(max_checks=1, check_interval=0.02, num_gpus=1)
    taken = Waiter(options, lambda text: None).take()
    assert [each.index for each in taken.gpus] == [1]
    with pytest.raises(NoGpuFree, match=r"reserved by .* from .*, and the job may still run then"):
        Waiter(replace(options, num_gpus=2, no_wait=True), lambda text: None).take()
    for lease in taken.leases:
        lease.close()
    assert Waiter(options, lambda text: None).look()[0][0].index == 1


@needs_root
def test_an_unused_reservation_lapses_for_all(shared: Path, standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("2x40GB")
    folder = ReservationFolder.made()
    now = time.time()
    make_for_other(machine.uuids, now + 10, now + 3 * HOUR, folder)
    views = [GpuView(replace(gpu(0), uuid=uuid)) for uuid in machine.uuids]
    seen = ReservedGpus()
    seen.look(now + 20, 0.0)
    assert all("until" in str(view.busy) for view in seen.views(views, now + 20))
    assert seen.look(now + 10 + 1801, 100.0)  # a decision may come out otherwise
    assert seen.views(views, now + 1811) == tuple(views)
    (lapsed,) = standings_now(Policy(), now + 1811)
    assert (lapsed.state(now + 1811), lapsed.lapsed_at) == (State.LAPSED, now + 10 + 1800)


@needs_root
def test_a_lease_of_the_owner_keeps_it(shared: Path, standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("2x40GB")
    folder, now = ReservationFolder.made(), time.time()
    folder.add(machine.uuids, now + 10, now + 3 * HOUR)
    later = now + 10 + 1801
    with LeaseFolder.default().acquire(machine.uuids[0]):  # type: ignore[union-attr]
        (held,) = standings_now(Policy(), later)
        assert held.state(later) is State.IN_FORCE
    (left,) = standings_now(Policy(), later)
    assert left.state(later) is State.LAPSED


def test_a_lapsed_one_is_marked_no_more(shared: Path, standin: Callable[..., SimulatedMachine]) -> None:
    machine = standin("2x40GB")
    folder, now = ReservationFolder.made(), time.time()
    made = folder.add(machine.uuids, now + 10, now + 3 * HOUR)
    before = (folder.path / f"{made.id}.used").stat().st_ctime_ns
    seen = ReservedGpus()
    seen.look(now + 2000, 0.0)
    seen.note_use(machine.uuids, now + 2000, 0.0)
    assert (folder.path / f"{made.id}.used").stat().st_ctime_ns == before
    seen.look(now + 20, 10.0)
    seen.note_use(machine.uuids, now + 20, 10.0)
    assert (folder.path / f"{made.id}.used").stat().st_ctime_ns > before


@pytest.mark.parametrize("jump_s", [-10 * 86400.0, 10 * 86400.0])
def test_a_clock_that_jumps_harms_nothing_for_good(
    shared: Path, standin: Callable[..., SimulatedMachine], jump_s: float
) -> None:
    machine = standin("2x40GB")
    folder, now = ReservationFolder.made(), time.time()
    folder.add(machine.uuids, now + 10, now + 3 * HOUR)
    views = [GpuView(replace(gpu(0), uuid=uuid)) for uuid in machine.uuids]
    seen = ReservedGpus()
    for number, at in enumerate((now + 60, now + 60 + jump_s, now + 120)):
        seen.look(at, 10.0 * number)
        assert len(seen.views(views, at)) == 2
    assert seen.mine(now + 120) == set(machine.uuids)


def test_a_folder_that_can_t_be_read_holds_nothing_up(
    shared: Path, monkeypatch: pytest.MonkeyPatch, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("1x40GB")
    ReservationFolder.made()

    def fail(self: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ReservationFolder, "read", fail)
    seen = ReservedGpus()
    for second in range(3):
        assert not seen.look(0.0, 10.0 * second)
    assert seen.views([GpuView(gpu(0))], 0.0) == (GpuView(gpu(0)),)
    (told,) = seen.fetch_notices()
    assert "reservations can't be read" in told
    assert seen.fetch_notices() == ()


def test_without_reservations_a_look_costs_next_to_nothing() -> None:
    seen = ReservedGpus()
    views = (GpuView(gpu(0)), GpuView(gpu(1)))
    began = time.process_time()
    for second in range(1000):
        seen.look(0.0, 2.0 * second)
        assert seen.views(views, 0.0) == views
    assert time.process_time() - began < 1.0


@needs_root
def test_a_change_that_a_look_for_other_reasons_finds_leads_to_a_decision(
    shared: Path, tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    """The state for ``gpuherd status`` asks for the same views, and must not swallow the news."""
    machine = standin("1x40GB")
    folder, now = ReservationFolder.made(), time.time()
    identity = make_for_other(machine.uuids, now - 60, now + HOUR, folder)
    root = RunDirectory(tmp_path / "run")
    root.root.mkdir()
    with Queue(root.queue) as queue:
        options = DispatchOptions(max_checks=1, check_interval=0.02)
        supervisor = Supervisor(root, queue.tag, options, 1.0)
        manager = GpuManager(options, queue.tag, supervisor, GpuHealth(queue))
        manager.watch.open()
        (view,) = manager.views(100.0, now)
        assert view.reserved is not None
        manager.changed = False
        (folder.path / f"{identity}.reservation").unlink()
        (view,) = manager.views(110.0, now + 10)
        assert view.reserved is None
        assert manager.changed
