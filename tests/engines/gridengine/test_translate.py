"""A batch in Grid Engine's words, and in a script."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuherd.engines.base import Batch, Parcel, Placement
from gpuherd.engines.export import IS_AMD
from gpuherd.engines.gridengine.commands import Complex
from gpuherd.engines.gridengine.options import GridEngineOptions
from gpuherd.engines.gridengine.translate import CannotRequest, arguments, checked, job_name, requests, script, suitable
from gpuherd.errors import UsageError

YES = {"gpu": Complex("INT", "YES"), "mem_free": Complex("MEMORY", "NO"), "h_vmem": Complex("MEMORY", "YES")}
ENVIRONMENTS = {
    "make": {"allocation_rule": "$round_robin", "control_slaves": "TRUE"},
    "mpi2": {"allocation_rule": "2", "control_slaves": "TRUE"},
    "mpi1": {"allocation_rule": "1", "control_slaves": "TRUE"},
    "loose1": {"allocation_rule": "1", "control_slaves": "FALSE"},
    "smp": {"allocation_rule": "$pe_slots", "control_slaves": "FALSE"},
}


def batch(folder: Path, count: int = 1, **more: Any) -> Batch:
    parcels = tuple(Parcel(attempt=number, title=f"job {number}") for number in range(count))
    return Batch(**{"name": "7a-1", "placement": Placement(gpus=1), "parcels": parcels, "folder": folder, **more})


def test_a_batch_is_an_array_and_a_single_parcel_is_none(tmp_path: Path) -> None:
    one = arguments(batch(tmp_path, command=("true",)), ["-q", "main"])
    assert one[:5] == ["-terse", "-N", "g-7a-1", "-r", "n"]
    assert one[-2:] == ["-q", "main"]
    assert "-t" not in one
    many = arguments(batch(tmp_path, 5, command=("true",), at_once=2, after=("8", "9.3", "9.4")), [])
    assert many[many.index("-t") : many.index("-t") + 4] == ["-t", "1-5", "-tc", "2"]
    assert many[-2:] == ["-hold_jid", "8,9"]


def test_names_that_begin_with_a_digit_are_no_names_for_grid_engine() -> None:
    assert (job_name("7a"), job_name("a7")) == ("g-7a", "a7")


@pytest.mark.parametrize(
    ("asked", "options", "known", "environment", "words"),
    [
        (Placement(gpus=2), {}, YES, None, ["-l", "gpu=2"]),
        (Placement(gpus=0), {"sge_queue": "a,b", "sge_project": "p"}, YES, None, ["-q", "a,b", "-P", "p"]),
        (Placement(gpus=4, cpus=2), {}, YES, ("smp", 2), ["-pe", "smp", "2", "-l", "gpu=2"]),
        (Placement(gpus=2, nodes=3), {}, YES, ("mpi2", 2), ["-pe", "mpi2", "6", "-l", "gpu=1"]),
        (Placement(gpus=3, cpus=2), {}, {"gpu": Complex("INT", "JOB")}, ("smp", 2), ["-pe", "smp", "2", "-l", "gpu=3"]),
        (
            Placement(gpus=1, cpus=2),
            {},
            {"gpu": Complex("DOUBLE", "YES")},
            ("smp", 2),
            ["-pe", "smp", "2", "-l", "gpu=0.500000"],
        ),
        (Placement(gpus=0, cpus=2, memory_mb=4001), {}, YES, ("smp", 2), ["-pe", "smp", "2", "-l", "mem_free=4001M"]),
        (
            Placement(gpus=0, cpus=2, memory_mb=4001),
            {"sge_memory": "h_vmem"},
            YES,
            ("smp", 2),
            ["-pe", "smp", "2", "-l", "h_vmem=2001M"],
        ),
        (Placement(gpus=0, time_s=3600.5), {"notice": 100.0}, YES, None, ["-l", "h_rt=3601,s_rt=3501"]),
        (Placement(gpus=0, time_s=1), {}, YES, None, ["-l", "h_rt=1,s_rt=1"]),
        (Placement(gpus=0), {"sge_args": ("-m e", "-l nv=1")}, YES, None, ["-m", "e", "-l", "nv=1"]),
    ],
)
def test_what_is_asked_for(
    asked: Placement,
    options: dict[str, Any],
    known: Mapping[str, Complex],
    environment: tuple[str, int] | None,
    words: list[str],
) -> None:
    assert requests(asked, GridEngineOptions(engine="gridengine", **options), known, environment) == words


@pytest.mark.parametrize(
    ("asked", "known", "said"),
    [
        (Placement(gpus=1), {}, "no resource gpu for GPUs"),
        (Placement(gpus=0, memory_mb=1), {}, "no resource mem_free for memory"),
        (Placement(gpus=1, cpus=2), YES, "counts gpu by slot"),
        (Placement(gpus=2, nodes=2), {"gpu": Complex("INT", "JOB")}, "once for a job"),
    ],
)
def test_what_can_not_be_asked_for(asked: Placement, known: Mapping[str, Complex], said: str) -> None:
    with pytest.raises(CannotRequest, match=said):
        requests(asked, GridEngineOptions(engine="gridengine"), known, ("smp", 2) if asked.cpus else None)


def test_which_parallel_environments_will_do() -> None:
    assert suitable(Placement(gpus=0, cpus=2), ENVIRONMENTS) == [("smp", 2), ("mpi2", 2)]
    assert suitable(Placement(gpus=2, nodes=2), ENVIRONMENTS) == [("mpi1", 1), ("mpi2", 2)]
    assert suitable(Placement(gpus=1, nodes=2, cpus=2), ENVIRONMENTS) == [("mpi2", 2)]
    assert suitable(Placement(gpus=1, nodes=2, cpus=3), ENVIRONMENTS) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.py", "no option of qsub"),
        ("-", "no option of qsub"),
        ("", "no option of qsub"),
        ("-t 1-9", "-t can't be given"),
        ("-m e -N me", "-N can't be given"),
        ("-pe smp 4", "use --sge-pe"),
        ("-m 'e", "No closing quotation"),
    ],
)
def test_words_that_are_not_the_users_to_say(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked([word])


HOSTILE = "a b'c\"$(touch no)`touch no`;\n%d"


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SGE_GPU": "3 1"}, "3,1"),
        ({"SGE_HGR_gpu": "0 2", "SGE_GPU": "7"}, "0,2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1", "SGE_GPU": "7"}, "GPU-1"),
    ],
)
def test_the_script_runs_its_own_parcel_with_its_gpus(tmp_path: Path, variables: dict[str, str], gpus: str) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    command = ("/bin/sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES $MODULE $1"', HOSTILE)
    options = GridEngineOptions(engine="gridengine", setup=("export MODULE=cuda",))
    text = script(batch(folder, 3, command=command), options, {"PATH": "/usr/bin:/bin"})
    own = {"SGE_TASK_ID": "2", **variables}
    done = subprocess.run(["/bin/bash", "-s"], input=text, text=True, env=own, cwd=tmp_path, timeout=30, check=False)
    assert done.returncode == 0
    assert (folder / "7a-1.1.out").read_text() == f"{gpus} cuda 1\n"
    assert [path.name for path in tmp_path.rglob("no")] == []


def test_gpus_of_amd_that_the_site_names(tmp_path: Path) -> None:
    command = ("/bin/sh", "-c", 'echo "$ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES ${CUDA_VISIBLE_DEVICES-unset}"')
    two = batch(tmp_path, command=command, placement=Placement(gpus=2))
    text = script(two, GridEngineOptions(engine="gridengine"), {}).replace(IS_AMD, "true")
    for own, seen in (
        ({"SGE_GPU": "3 1"}, "3,1 0,1 unset\n"),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "SGE_GPU": "3 1"}, "2,0  unset\n"),
    ):
        (tmp_path / "7a-1.0.out").unlink(missing_ok=True)
        assert subprocess.run(["/bin/bash", "-s"], input=text, text=True, env=own, timeout=30).returncode == 0
        assert (tmp_path / "7a-1.0.out").read_text() == seen


def test_without_gpus_none_are_seen_and_where_the_site_names_none_they_are_leased(tmp_path: Path) -> None:
    none = script(
        batch(tmp_path, command=("true",), placement=Placement(gpus=0)), GridEngineOptions(engine="gridengine"), {}
    )
    assert "export CUDA_VISIBLE_DEVICES=\n" in none
    assert "gpuherd run" not in none
    some = script(batch(tmp_path, command=("true",)), GridEngineOptions(engine="gridengine"), {})
    assert "-m gpuherd run --engine local --num-gpus 1" in some


@pytest.mark.parametrize(("sent", "code"), [("USR2", 76), ("TERM", 75), ("USR1", 75)])
def test_the_exit_status_tells_accounting_of_a_deletion(tmp_path: Path, sent: str, code: int) -> None:
    command = ("/bin/bash", "-c", f"trap 'exit 75' USR1 USR2 TERM; kill -{sent} 0; sleep 9", "lead")
    text = script(
        batch(tmp_path, command=command, placement=Placement(gpus=0)), GridEngineOptions(engine="gridengine"), {}
    )
    done = subprocess.run(["/bin/bash", "-s"], input=text, text=True, start_new_session=True, timeout=30, check=False)
    assert done.returncode == code
