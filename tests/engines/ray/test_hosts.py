"""The whole of it over three hosts: a queue, its loop, Ray, and a host that dies with its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from tests.engines.ray.network import ThreeHosts, possible
from tests.patience import wait_until

from gpuherd.jobs.queue.store import Queue

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not possible(), reason="it needs root and network namespaces"),
]

# Runs on the head, as a person would: a queue in a folder that all hosts see.
_FOLLOWER = """
import json, sys
from pathlib import Path
from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
address, folder, jobs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
options = DispatchOptions(engine="ray", ray_address=address)
plan = [Job(**{**job, "argv": tuple(job["argv"])}) for job in jobs]
sys.exit(run_jobs(plan, options, RunDirectory(folder)).exit_code)
"""

_TRAIN = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.tensor([[float(rank + 1)]])).sum().backward()
host = os.uname().nodename
words = ("rank", rank, dist.get_world_size(), host, model.module.weight.grad.item())
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: others write there too
dist.barrier()
dist.destroy_process_group()
"""


def follow(hosts: ThreeHosts, folder: Path, jobs: list[dict[str, object]]) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", textwrap.dedent(_FOLLOWER), hosts.address, str(folder), json.dumps(jobs)]
    return hosts.start(words)


def test_torchrun_over_two_hosts_and_a_host_that_dies_with_its_jobs(tmp_path: Path) -> None:
    """First a model over two hosts; then one host dies while each of its GPUs has a job: every job finishes once."""
    train = tmp_path / "train.py"
    train.write_text(_TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(train)]
    with ThreeHosts(gpus=2) as hosts:
        with follow(
            hosts, tmp_path / "training", [{"name": "train", "argv": torchrun, "gpus": 2, "nodes": 2}]
        ) as training:
            said = training.communicate()[0]
        text = "".join(path.read_text() for path in (tmp_path / "training" / "logs").glob("*train*"))
        assert training.returncode == 0, said + text
        ranks = [line.split()[1:] for line in text.splitlines() if line.startswith("rank")]
        assert sorted((each[0], each[1], each[3]) for each in ranks) == [(str(n), "4", "2.5") for n in range(4)]
        assert len({each[2] for each in ranks}) == 2

        marks, gate = tmp_path / "marks", tmp_path / "gate"
        marks.mkdir()
        script = (
            f'n=$1; uname -n >"{marks}/$n.began.$$"; until [ -e "{gate}" ]; do sleep 0.1; done; '
            f'uname -n >"{marks}/$n.done.$$"'
        )
        jobs: list[dict[str, object]] = [
            {"name": f"job-{n}", "argv": ["sh", "-c", script, "job", str(n)], "gpus": 1} for n in range(8)
        ]
        with follow(hosts, tmp_path / "jobs", jobs) as following:
            wait_until(lambda: len(list(marks.glob("*.began.*"))) == 6, 120)  # all GPUs have a job, and two jobs wait
            lost = hosts.hosts[2]
            there = [path for path in marks.glob("*.began.*") if path.read_text().strip() == lost.name]
            assert len(there) == 2
            lost.die()
            gate.touch()
            said = following.communicate()[0]
        assert following.returncode == 0, said
        finished = [path.name.partition(".")[0] for path in marks.glob("*.done.*")]
        assert sorted(finished) == [str(n) for n in range(8)]
        began = [path.name.partition(".")[0] for path in marks.glob("*.began.*")]
        assert sorted(began) == sorted([*map(str, range(8)), *(path.name.partition(".")[0] for path in there)])


def test_gpus_of_further_hosts_are_told_by_their_hosts_names_and_numbers(tmp_path: Path) -> None:
    """A job over all hosts while another has a GPU of one of them: there its GPU has another number."""
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    marks.mkdir()
    tells = f'echo "$(uname -n):$CUDA_VISIBLE_DEVICES" >"{marks}/$1.${{NODE_RANK-}}.$$"'
    script = f'{tells}; until [ -e "{gate}" ]; do sleep 0.1; done'

    def job(name: str, nodes: int) -> dict[str, object]:
        return {"name": name, "argv": ["sh", "-c", script, "job", name], "gpus": 1, "nodes": nodes}

    def written(name: str) -> list[str]:
        return [path.read_text().strip() for path in sorted(marks.glob(f"{name}.*")) if path.read_text()]

    with ThreeHosts(gpus=2) as hosts, follow(hosts, tmp_path / "held", [job("held", 1)]) as holding:
        wait_until(lambda: len(written("held")) == 1, 120)
        with follow(hosts, tmp_path / "wide", [job("wide", 3)]) as following:
            wait_until(lambda: len(written("wide")) == 3, 120)
            queue = tmp_path / "wide" / "queue.sqlite"

            def labels() -> tuple[str, ...]:
                with closing(Queue(queue, check=False)) as open_queue:
                    (attempt,) = open_queue.attempts()
                return attempt.gpus

            wait_until(lambda: labels() == tuple(written("wide")), 60)
            assert not any(label in written("held") for label in labels())
            assert len({label.partition(":")[2] for label in labels()}) == 2
            gate.touch()
            assert following.wait() == 0
        assert holding.wait() == 0
