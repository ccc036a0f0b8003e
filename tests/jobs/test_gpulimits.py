"""Quick looks, limits, the machine's policy, and leases that nobody uses, through the dispatcher's eye on the GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.errors import NoSuchGpu
from gpuherd.gpus.leases import LeaseFolder, LeaseNote
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.jobs.options import GpuOptions
from gpuherd.jobs.settings import Policy, Settings
from gpuherd.standin.machine import SimulatedMachine

OPTIONS = GpuOptions(max_checks=3, check_interval=1.0)


@pytest.fixture
def machine(standin: Callable[..., SimulatedMachine]) -> SimulatedMachine:
    return standin("2x40GB")


@pytest.fixture
def watch(machine: SimulatedMachine) -> GpuWatch:
    return GpuWatch(OPTIONS, "queue")


def verdicts(watch: GpuWatch, *, now: float) -> list[str | None]:
    return [view.busy for view in watch.views(now, ())]


# --- quick looks --------------------------------------------------------------------------------------------------


def test_between_two_checks_only_a_change_of_memory_is_worth_a_full_look(
    watch: GpuWatch, machine: SimulatedMachine
) -> None:
    occupation = machine.occupy(0, 20_000)
    machine.occupy(1, 20_000)
    assert watch.look(100.0, ())
    calls = machine.calls
    assert not watch.look(100.1, ())
    assert machine.calls - calls == 2  # one question a GPU
    occupation.release()
    assert watch.look(100.2, ())
    assert verdicts(watch, now=100.2) == ["free for 1 of 3 checks", "20000 MB used (threshold 500)"]


def test_how_often_it_wants_to_look(machine: SimulatedMachine) -> None:
    eager = GpuWatch(GpuOptions(max_checks=1, check_interval=60.0), "queue")
    machine.occupy(0, 20_000)
    machine.occupy(1, 20_000)
    eager.look(100.0, ())
    assert eager.look_in_s(100.0) == pytest.approx(0.125)
    patient = GpuWatch(GpuOptions(max_checks=61, check_interval=1.0), "queue")
    patient.look(100.0, ())
    # In use, so that the next full look is in 5 s; cheap ones come a twelfth of the quiet time apart, or a check.
    assert patient.look_in_s(100.0) == pytest.approx(1.0)
    assert patient.look_in_s(104.7) == pytest.approx(0.3)


def test_a_full_look_that_is_due_soon_is_made_together_with_a_cheap_one(machine: SimulatedMachine) -> None:
    """To wake up a second time costs more than to look."""
    watch = GpuWatch(GpuOptions(max_checks=61, check_interval=1.0), "queue")
    for gpu in (0, 1):
        machine.occupy(gpu, 20_000)
    watch.look(100.0, ())

    def calls(now: float) -> int:
        before = machine.calls
        watch.look(now, ())
        return machine.calls - before

    assert calls(104.4) == 2  # one question a GPU; the full look is due at 105, and the next cheap one at 105.4
    assert calls(104.6) > 2
    assert calls(105.0) == 2


def test_a_lease_that_is_given_back_is_noticed_by_a_quick_look(machine: SimulatedMachine) -> None:
    watch = GpuWatch(GpuOptions(max_checks=1, check_interval=5.0), "queue")
    lease = LeaseFolder.default().acquire(machine.uuid(0))
    assert lease is not None
    watch.look(100.0, ())
    assert verdicts(watch, now=100.0)[0] is not None
    assert not watch.look(100.1, ())
    lease.close()
    assert watch.look(100.2, ())
    assert verdicts(watch, now=100.2) == [None, None]


# --- limits, policy, leases that nobody uses -------------------------------------------------------------------------


def test_gpus_that_the_policy_keeps_for_others(machine: SimulatedMachine) -> None:
    policy = Policy(exclude_gpus=("0",), path=Path("/etc/gpuherd/policy.toml"))
    assert [gpu.label for gpu in GpuWatch(OPTIONS, "queue", Settings(policy=policy)).gpus] == ["1"]
    with pytest.raises(NoSuchGpu, match=r"GPU 0 is not for gpuherd to use: exclude_gpus in /etc"):
        GpuWatch(GpuOptions(gpu_list=(1, 0)), "queue", Settings(policy=policy))
    all_of_them = Policy(exclude_gpus=("0", machine.uuid(1)), path=policy.path)
    assert "keeps all GPUs" in str(GpuWatch(OPTIONS, "queue", Settings(policy=all_of_them)).problem)


def test_a_limit_holds_over_all_of_ones_runs(machine: SimulatedMachine) -> None:
    settings = Settings(max_gpus=1)
    here, there = GpuWatch(OPTIONS, "queue", settings), GpuWatch(OPTIONS, "other", settings)
    for watch in (here, there):
        for now in (100.0, 101.0, 102.0):
            watch.look(now, ())
    first, second = here.gpus
    assert here.leases.take((first, second), "j", 102.0) is None
    leases = here.leases.take((first,), "j", 102.0)
    assert leases is not None
    assert there.leases.take((second,), "j", 102.0) is None
    assert verdicts(there, now=102.0)[1] == "at most 1 GPU by your own settings; 1 are held"
    assert there.leases.allowance(()).closed == "at most 1 GPU by your own settings; 1 are held by your other runs"
    assert here.leases.allowance((first.uuid,)).max_gpus == 1
    leases[0].close()
    there.look(103.0, ())
    assert verdicts(there, now=103.0) == [None, None]
    again = there.leases.take((second,), "j", 103.0)
    assert again is not None
    again[0].close()


def test_other_options_hold_at_once_and_what_is_known_stays(watch: GpuWatch, machine: SimulatedMachine) -> None:
    for now in (100.0, 101.0):
        watch.look(now, ())
    watch.change(GpuOptions(max_checks=2, check_interval=1.0, gpu_list=(1,)), Settings())
    assert verdicts(watch, now=101.0) == [None]
    with pytest.raises(NoSuchGpu):
        watch.change(GpuOptions(gpu_list=(7,)), Settings())
    assert [gpu.label for gpu in watch.gpus] == ["1"]


def test_a_lease_that_nobody_uses_is_told_of_and_passed_over_in_the_end(machine: SimulatedMachine) -> None:
    settings = Settings(policy=Policy(idle_lease_s=600.0))
    watch = GpuWatch(GpuOptions(max_checks=1, gpu_list=(0,)), "queue", settings)
    with LeaseFolder.default().acquire(machine.uuid(0), LeaseNote("forgotten")) or pytest.fail("free"):
        for now in range(1_000, 1_650, 10):
            watch.look(now, ())
            assert verdicts(watch, now=now)[0] is not None
        assert "job forgotten, and nobody has used it for 10 min" in str(verdicts(watch, now=1_640)[0])
        for now in range(1_650, 1_680, 10):
            watch.look(now, ())
        assert verdicts(watch, now=1_670) == [None]
        leases = watch.leases.take(watch.gpus, "mine", 1_670)
        assert leases is not None
        (notice,) = watch.fetch_notices()
        assert "job forgotten" in notice
        assert "passed over" in notice
        assert watch.fetch_notices() == ()
        other = GpuWatch(GpuOptions(max_checks=1, gpu_list=(0,)), "other", settings)
        other.look(1_680, ())
        assert other.leases.take(other.gpus, "theirs", 1_680) is None
        leases[0].close()
        watch.rest()


def test_who_waits_no_more_is_in_nobodys_way(machine: SimulatedMachine) -> None:
    watch = GpuWatch(GpuOptions(max_checks=1, gpu_list=(0,)), "queue", Settings(policy=Policy(idle_lease_s=600.0)))
    lease = LeaseFolder.default().acquire(machine.uuid(0))
    assert lease is not None
    for now in range(1_000, 1_200, 10):
        watch.look(now, ())
    lease.close()
    assert LeaseFolder.default().acquire(machine.uuid(0)) is None  # it sits and watches
    watch.rest()
    with LeaseFolder.default().acquire(machine.uuid(0)) or pytest.fail("free"):
        pass
