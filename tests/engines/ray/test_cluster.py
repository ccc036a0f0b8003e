"""Tasks on a real Ray cluster of two nodes with 4 GPUs each that are only counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from tests.engines.ray.cluster import TwoNodes
from tests.engines.ray.nodes import GPUS
from tests.engines.ray.parcels import Parcels, all_in
from tests.patience import Gate, wait_until

from gpuherd.engines.base import End, EngineAway, Phase, Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.process_tree import ATTEMPT_VARIABLE
from gpuherd.engines.ray.engine import RayEngine
from gpuherd.errors import UsageError
from gpuherd.jobs.remote.agent import join, lead

LONG = ["sh", "-c", "echo began; sleep 600"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def engine_of(cluster: TwoNodes, **options: object) -> RayEngine:
    return RayEngine(EngineOptions(engine="ray", ray_address=cluster.address, **options), lead, join)  # type: ignore[arg-type]


@pytest.fixture
def engine(two_nodes: TwoNodes) -> Iterator[RayEngine]:
    found = engine_of(two_nodes)
    yield found
    found.close()


def test_500_jobs_on_8_gpus_never_share_one(engine: RayEngine, tmp_path: Path) -> None:
    """A GPU is a node (its raylet) and what CUDA_VISIBLE_DEVICES says there."""
    line = '"$RAY_RAYLET_PID $CUDA_VISIBLE_DEVICES $began $(date +%s%N)"'
    script = f"began=$(date +%s%N); sleep 0.02; echo {line}"
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", script], Placement(gpus=1), count=500)
    engine.submit(jobs.batch)
    seen = jobs.to_the_end(engine, 240)
    assert {each.end for each in seen.values()} == {End.OK}
    by_gpu: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for number in range(500):
        node, gpu, began, ended = jobs.log(number).split()  # one line, so it ran once
        by_gpu.setdefault((node, gpu), []).append((int(began), int(ended)))
    assert {gpu for _, gpu in by_gpu} == {str(number) for number in range(GPUS)}
    assert len(by_gpu) == 2 * GPUS
    for spans in by_gpu.values():
        spans.sort()
        assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))


def test_a_job_sees_its_gpus_and_one_without_sees_none(engine: RayEngine, tmp_path: Path) -> None:
    show = ["sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"']
    for gpus, pattern in ((0, "[]"), (GPUS, "[0,1,2,3]")):
        jobs = Parcels(tmp_path / str(gpus), show, Placement(gpus=gpus))
        engine.submit(jobs.batch)
        jobs.to_the_end(engine)
        assert jobs.log().strip() == pattern
        claim = jobs.claim()
        assert claim is not None and claim.gpus == tuple(str(number) for number in range(gpus))


def test_a_failure_is_told_by_the_node_and_seen_in_ray(engine: RayEngine, tmp_path: Path) -> None:
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", "exit 3"], Placement(gpus=1))
    engine.submit(jobs.batch)
    seen = jobs.to_the_end(engine)[0]
    assert (seen.phase, seen.end) == (Phase.ENDED, End.FAILED)
    assert jobs.ended().code == 3


def test_who_waits_is_told_for_what_and_who_runs_where(engine: RayEngine, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", gate.wait], Placement(gpus=GPUS), count=3)
    engine.submit(jobs.batch)
    seen = jobs.until(
        engine,
        lambda seen: (
            sum(each.phase is Phase.RUNNING for each in seen.values()) == 2
            and any("waits for 4 GPUs" in (each.reason or "") for each in seen.values())
        ),
    )
    assert {each.node for each in seen.values() if each.phase is Phase.RUNNING} == {os.uname().nodename}
    gate.open()
    assert all_in(jobs.to_the_end(engine), Phase.ENDED)


def test_cancelled_jobs_end_with_their_grace_and_only_then_their_gpus_are_free(
    engine: RayEngine, tmp_path: Path
) -> None:
    """It ignores SIGTERM, so it has its GPUs until it is killed; who comes next must not begin before."""
    stubborn = ["sh", "-c", "trap '' TERM; echo began; while true; do sleep 0.1; date +%s%N; done"]
    first = Parcels(tmp_path / "first", stubborn, Placement(gpus=GPUS), count=2)
    handles = engine.submit(first.batch)
    first.begin()
    later = Parcels(tmp_path / "later", ["date", "+%s%N"], Placement(gpus=GPUS))
    engine.submit(later.batch)
    engine.cancel(handles)
    assert {each.end for each in first.to_the_end(engine).values()} == {End.CANCELLED}
    assert all(first.ended(n).interrupted and first.ended(n).signal == signal.SIGKILL for n in range(2))
    later.to_the_end(engine)
    last_words = [int(first.log(n).split()[-1]) for n in range(2)]
    assert int(later.log()) > min(last_words)


def test_cancelled_before_it_began_it_never_begins(engine: RayEngine, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    before = Parcels(tmp_path / "before", ["sh", "-c", gate.wait], Placement(gpus=GPUS), count=2)
    engine.submit(before.batch)
    before.until(engine, lambda seen: all_in(seen, Phase.RUNNING))
    jobs = Parcels(tmp_path / "jobs", ["true"], Placement(gpus=GPUS), count=3)
    engine.cancel(engine.submit(jobs.batch))
    assert {each.end for each in jobs.to_the_end(engine).values()} == {End.CANCELLED}
    gate.open()
    before.to_the_end(engine)
    assert all(jobs.claim(number) is None for number in range(3))


def test_a_turn_ends_before_the_time_is_up(two_nodes: TwoNodes, tmp_path: Path) -> None:
    engine = engine_of(two_nodes, notice=9.5)
    jobs = Parcels(tmp_path / "jobs", ["sleep", "60"], Placement(gpus=1, time_s=10.0))
    engine.submit(jobs.batch)
    assert jobs.to_the_end(engine)[0].end is End.TIME_UP
    engine.close()
    assert jobs.ended().interrupted and jobs.ended().signal == signal.SIGTERM


def test_what_no_node_has_is_refused_before_anything_starts(two_nodes: TwoNodes) -> None:
    engine = engine_of(two_nodes, ray_resources=("licence=2",))
    reasons = engine.check([Placement(gpus=GPUS), Placement(gpus=GPUS + 1), Placement(gpus=1, nodes=2)])
    engine.close()
    assert reasons.keys() == {Placement(gpus=GPUS + 1), Placement(gpus=1, nodes=2)}
    assert "the most that any of the Ray cluster's 2 nodes has is 4 GPUs" in reasons[Placement(gpus=GPUS + 1)]
    assert "1 of the Ray cluster's 2 nodes has that" in reasons[Placement(gpus=1, nodes=2)]  # the licences


def test_a_custom_resource_is_taken_and_given_back(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """There are two licences, so that no more than two of these ever run at once."""
    engine = engine_of(two_nodes, ray_resources=("licence=1",))
    script = "date +%s%N; sleep 0.2; date +%s%N"
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", script], Placement(gpus=0), count=6)
    engine.submit(jobs.batch)
    jobs.to_the_end(engine)
    engine.close()
    spans = [tuple(map(int, jobs.log(number).split())) for number in range(6)]
    assert max(sum(began <= at < ended for began, ended in spans) for at, _ in spans) <= 2


def test_a_node_dies_with_its_jobs_and_every_job_finishes_once(
    two_nodes: TwoNodes, engine: RayEngine, tmp_path: Path
) -> None:
    """As whoever follows them does, the lost ones are handed over again as further attempts."""
    gate = Gate(tmp_path / "gate")
    script = f"echo began; {gate.wait}; echo done"
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", script], Placement(gpus=1), count=2 * GPUS)
    engine.submit(jobs.batch)
    jobs.begin()
    two_nodes.tell("kill")
    try:
        seen = jobs.until(engine, lambda seen: sum(each.phase is Phase.ENDED for each in seen.values()) == GPUS)
        lost = [number for number, each in seen.items() if each.phase is Phase.ENDED]
        assert {seen[number].end for number in lost} <= {End.NODE_LOST, End.FAILED}
        # Nothing is held against them: they were told to make room, or nobody saw how they ended.
        ends = [jobs.ended(number) for number in lost]
        assert all(each.interrupted or (each.code, each.signal) == (None, None) for each in ends)
        gate.open()
        seen = jobs.to_the_end(engine)
        assert [number for number, each in seen.items() if each.end is not End.OK] == lost
        again = Parcels(tmp_path / "again", ["sh", "-c", script], Placement(gpus=1), count=GPUS)
        engine.submit(again.batch)
        assert {each.end for each in again.to_the_end(engine).values()} == {End.OK}
        finished = [jobs.log(number) for number in range(2 * GPUS)] + [again.log(number) for number in range(GPUS)]
        assert sum(text.count("done") for text in finished) == 2 * GPUS
    finally:
        two_nodes.tell("add")


def test_a_worker_that_dies_takes_its_job_along(engine: RayEngine, tmp_path: Path) -> None:
    jobs = Parcels(tmp_path / "jobs", LONG, Placement(gpus=1))
    engine.submit(jobs.batch)
    jobs.begin()
    claim = jobs.claim()
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    seen = jobs.to_the_end(engine)[0]
    assert (seen.end, seen.reason) == (End.FAILED, "Ray's worker died while it led the job")
    assert "killed" in (jobs.ended().problem or "")
    wait_until(lambda: not alive(jobs))


def test_over_two_nodes_torchrun_finds_together_by_gloo(engine: RayEngine, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            with torch.no_grad():
                model.module.weight.fill_(1.0)
            model(torch.tensor([[float(rank + 1)]])).sum().backward()
            grad = model.module.weight.grad.item()
            words = ("rank", rank, dist.get_world_size(), os.environ["NODE_RANK"], grad)
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: others write there too
            dist.barrier()
            dist.destroy_process_group()
            """
        )
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    jobs = Parcels(tmp_path / "jobs", words, Placement(gpus=2, nodes=2))
    engine.submit(jobs.batch)
    seen = jobs.to_the_end(engine, 200)
    text = jobs.log() + (jobs.folder / "0.log.node1").read_text()
    assert seen[0].end is End.OK, text
    ranks = sorted(line.split()[1:] for line in text.splitlines() if line.startswith("rank"))
    # Each gradient is its rank + 1; their mean over 4 ranks is 2.5.
    assert ranks == [[str(rank), "4", str(rank // 2), "2.5"] for rank in range(4)]


def test_the_first_failure_of_several_nodes_ends_them_all(engine: RayEngine, tmp_path: Path) -> None:
    script = '[ "$NODE_RANK" = 1 ] && exit 7; sleep 600'
    jobs = Parcels(tmp_path / "jobs", ["sh", "-c", script], Placement(gpus=1, nodes=2))
    engine.submit(jobs.batch)
    assert jobs.to_the_end(engine)[0].end is End.FAILED
    assert jobs.ended().code == 7
    again = Parcels(tmp_path / "again", ["true"], Placement(gpus=GPUS, nodes=2))  # all is free again
    engine.submit(again.batch)
    assert again.to_the_end(engine)[0].end is End.OK


def test_what_nobody_has_handed_over_is_not_known(engine: RayEngine, tmp_path: Path) -> None:
    jobs = Parcels(tmp_path / "jobs", ["true"], Placement(gpus=1))
    assert engine.look(jobs.tickets) == {}
    engine.cancel([f"{jobs.batch.name}-0"])


def test_its_follower_is_killed_and_nothing_goes_on(two_nodes: TwoNodes, tmp_path: Path) -> None:
    follower = tmp_path / "follower.py"
    follower.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            from tests.engines.ray.parcels import Parcels
            from gpuherd.engines.base import Placement
            from gpuherd.engines.options import EngineOptions
            from gpuherd.engines.ray.engine import RayEngine
            from gpuherd.jobs.remote.agent import lead
            engine = RayEngine(EngineOptions(engine="ray", ray_address=sys.argv[1]), lead)
            jobs = Parcels(Path(sys.argv[2]), ["sh", "-c", "echo began; sleep 600"], Placement(gpus=1), count=2)
            engine.submit(jobs.batch)
            jobs.begin()
            print("begun", flush=True)
            time.sleep(600)
            """
        )
    )
    folder = tmp_path / "jobs"
    words = [sys.executable, str(follower), two_nodes.address, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # where these tests are found
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        children = psutil.Process(process.pid).children()
        process.kill()
    wait_until(lambda: all((folder / f"{number}.ended").exists() for number in range(2)))
    wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


def test_the_process_beside_ray_dies_and_the_engine_joins_again(engine: RayEngine, tmp_path: Path) -> None:
    jobs = Parcels(tmp_path / "jobs", LONG, Placement(gpus=1))
    engine.submit(jobs.batch)
    jobs.begin()
    assert engine._channel is not None
    os.kill(engine._channel.pid, signal.SIGKILL)
    with pytest.raises(EngineAway, match="Ray has ended our connection"):
        engine.look(jobs.tickets)
    assert engine.look(jobs.tickets) == {}
    assert jobs.ended().problem is not None


def test_another_version_of_ray_is_one_sentence(two_nodes: TwoNodes) -> None:
    engine = engine_of(two_nodes)
    two_nodes.tell("other")
    try:
        with pytest.raises(UsageError, match=r"runs Ray 1\.2\.3 with Python .*pip install 'ray\[default\]==1\.2\.3'"):
            engine.check([Placement(gpus=1)])
    finally:
        two_nodes.tell("same")
        engine.close()


@pytest.mark.parametrize(
    "variables", [{"RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token"}]
)
def test_a_refused_token_is_told_with_what_to_do(
    two_nodes: TwoNodes, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    engine = engine_of(two_nodes)
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN_PATH to the cluster's token"):
        engine.check([Placement(gpus=1)])
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_nodes_without_gpuherd_are_told_before_anything_starts(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader whose module is here, and not in Ray's workers."""
    (tmp_path / "leader_of_here.py").write_text(
        "import os\nif 'RAY_RAYLET_PID' in os.environ:\n    raise ImportError('not on this node')\n"
        "def lead(*words, **more):\n    return 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    import leader_of_here  # type: ignore[import-not-found]

    engine = RayEngine(EngineOptions(engine="ray", ray_address=two_nodes.address), leader_of_here.lead)
    with pytest.raises(UsageError, match=r"can't run gpuherd .*leader_of_here.*install the same gpuherd there"):
        engine.check([Placement(gpus=1)])
    engine.close()


def test_nobody_answers() -> None:
    engine = RayEngine(EngineOptions(engine="ray", ray_address="127.0.0.1:1"), lead)
    with pytest.raises(EngineAway, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        engine.check([Placement(gpus=1)])
    engine.close()


def alive(jobs: Parcels) -> bool:
    """Whether any process of its attempts is there."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(ATTEMPT_VARIABLE, "").startswith(f"{jobs.batch.name}/"):
                return True
        except (psutil.Error, OSError):
            continue
    return False
