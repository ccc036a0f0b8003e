"""sbatch's words and the script, by themselves; the script is run by a real shell."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.base import Batch, Parcel, Placement
from gpuherd.engines.batch_system import notice_s
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm.commands import SLURM
from gpuherd.engines.slurm.engine import Piece, arguments, checked, named, pieces, script, throttles
from gpuherd.errors import UsageError


def batch(count: int = 1, *, folder: Path = Path("/runs/a b"), command: tuple[str, ...] = ("run", "x")) -> Batch:
    parcels = tuple(Parcel(attempt=number, title=f"job {number}") for number in range(count))
    return Batch(name="b1.2-3", placement=Placement(gpus=1), parcels=parcels, command=command, folder=folder)


def words(batch: Batch, largest: int = 1001, **options: object) -> list[str]:
    (piece,) = pieces(batch, largest)
    return arguments(batch, piece, EngineOptions(engine="slurm", **options))  # type: ignore[arg-type]


def test_all_that_can_be_asked_for() -> None:
    asked = Placement(gpus=2, nodes=3, cpus=16, memory_mb=64 * 1024, time_s=4 * 3600 + 1)
    wanted = replace(batch(4), placement=asked, after=("7_1", "8"), at_once=2)
    (piece,) = pieces(wanted, 1001)
    options = EngineOptions(
        engine="slurm",
        partition="long",
        account="lab",
        qos="high",
        constraint="a100&ib",
        gpu_type="a100",
        notice=300.0,
        slurm_args=("--exclude=n3", "--time=5"),
    )
    assert arguments(wanted, piece, options, throttle=2) == [
        "--parsable",
        "--no-requeue",
        "--job-name=b1.2-3",
        "--export=ALL",
        "--chdir=/runs/a b",
        "--array=0-3%2",
        "--gres=gpu:a100:2",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--mem=65536M",
        "--time=241",
        "--partition=long",
        "--account=lab",
        "--qos=high",
        "--constraint=a100&ib",
        "--dependency=afterok:7_1:8",
        "--kill-on-invalid-dep=yes",
        "--signal=B:USR1@300",
        "--output=/runs/a b/b1.2-3.%a.out",
        "--comment=gpuherd: job 0 and 3 more",
        "--exclude=n3",
        "--time=5",
    ]


def test_what_is_not_asked_for_is_left_to_the_site() -> None:
    said = words(replace(batch(), placement=Placement(gpus=0)))
    assert {word.partition("=")[0] for word in said} == {
        "--parsable",
        "--no-requeue",
        "--job-name",
        "--export",
        "--chdir",
        "--nodes",
        "--ntasks-per-node",
        "--kill-on-invalid-dep",
        "--signal",
        "--output",
        "--comment",
    }


def test_a_per_cent_sign_in_a_folder_is_none_of_slurms_patterns() -> None:
    assert "--output=/100%%j/b1.2-3.0.out" in words(batch(folder=Path("/100%j")))
    assert "--output=/100%%j/b1.2-3.%a.out" in words(batch(2, folder=Path("/100%j")))


@pytest.mark.parametrize(
    ("wanted_s", "time_s", "given_s"),
    [(120, None, 120), (120, 3600, 120), (120, 60, 30), (1e9, None, 65535), (0.1, 60, 1)],
)
def test_a_notice_leaves_half_of_the_time(wanted_s: float, time_s: float | None, given_s: int) -> None:
    assert notice_s(wanted_s, time_s, 65535) == given_s


@given(st.integers(1, 300), st.integers(0, 60))
def test_pieces_hold_each_parcel_once_and_are_found_by_name(count: int, largest: int) -> None:
    parts = pieces(batch(count), largest)
    held = [(part.name, place) for part in parts for place in range(part.count)]
    assert held == [named("b1.2-3", index, largest) for index in range(count)]
    assert len(set(held)) == count
    assert all(part.count <= max(1, largest) and part.single == (part.count == 1) for part in parts)
    handles = [handle for number, part in enumerate(parts) for handle in SLURM.handles(str(100 + number), part.count)]
    assert len(set(handles)) == count


@given(st.integers(1, 50), st.integers(1, 50))
def test_several_arrays_together_keep_the_limit(at_once: int, parts: int) -> None:
    each, side_by_side = throttles(replace(batch(), at_once=at_once), parts)
    assert each is not None
    assert each >= 1
    assert 1 <= side_by_side <= parts
    assert each * side_by_side <= at_once


def test_the_next_array_waits_for_the_end_of_another() -> None:
    wanted = replace(batch(20), at_once=1, after=("3",))
    second = pieces(wanted, 10)[1]
    said = arguments(wanted, second, EngineOptions(engine="slurm"), throttle=1, behind="77")
    assert "--dependency=afterok:3,afterany:77" in said
    assert "--job-name=b1.2-3+10" in said
    assert "--array=0-9%1" in said


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), max_size=4),
    st.sampled_from([Piece("b", 0, 5, False), Piece("b", 10, 5, False), Piece("b", 7, 1, True)]),
)
def test_a_shell_gives_each_word_of_the_command_as_it_is(arguments: list[str], piece: Piece) -> None:
    command = ("printf", "%s\\0", "word", *arguments)
    text = script(batch(20, folder=Path("/tmp"), command=command), piece, EngineOptions(engine="slurm"))
    # What an array of several pieces prints goes to its own file; here it is to be seen.
    text = "\n".join(line for line in text.split("\n") if not line.startswith("exec >>"))
    done = subprocess.run(
        ["bash"], input=text.encode(), capture_output=True, env={"SLURM_ARRAY_TASK_ID": "3", "PATH": "/bin:/usr/bin"}
    )
    index = piece.first if piece.single else piece.first + 3
    assert done.stdout.decode().split("\0") == ["word", *arguments, str(index), ""]


def test_a_later_array_prints_where_its_jobs_are_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME; %a"
    folder.mkdir()
    wanted = batch(20, folder=folder, command=("echo", "I am"))
    text = script(wanted, pieces(wanted, 8)[1], EngineOptions(engine="slurm"))
    subprocess.run(["bash"], input=text.encode(), check=True, env={"SLURM_ARRAY_TASK_ID": "3", "PATH": "/bin:/usr/bin"})
    assert wanted.output(11).read_text() == "I am 11\n"


def test_the_users_lines_come_first_and_srun_learns_of_the_cpus() -> None:
    wanted = replace(batch(), placement=Placement(gpus=1, cpus=6))
    text = script(
        wanted, pieces(wanted, 10)[0], EngineOptions(engine="slurm", setup=("module load cuda", "ulimit -n 9"))
    )
    assert text.splitlines() == [
        "#!/bin/bash",
        "# b1.2-3: 1 of gpuherd's jobs.",
        "export SRUN_CPUS_PER_TASK=6",
        "module load cuda",
        "ulimit -n 9",
        'exec run x "0"',
    ]


@pytest.mark.parametrize(
    "word", ["--exclude=n[1-3]", "-xn3", "--mail-type=END", "--reservation=x", "--nodelist=n1", "--nice"]
)
def test_words_for_sbatch_are_given_on(word: str) -> None:
    assert words(batch(), slurm_args=(word,))[-1] == word


@pytest.mark.parametrize(
    "word",
    [
        "--array=0-5",
        "--arr=0-5",
        "-a0-5",
        "--job-name=x",
        "-Jx",
        "--requeue",
        "--wrap=rm",
        "-M",
        "--clusters=b",
        "-N2",
        "--wait",
        "--usage",
    ],
)
def test_what_we_must_say_ourselves_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"can't be given"):
        checked([word])


@pytest.mark.parametrize("word", ["script.sh", "", "-", "--", "exclude=n3"])
def test_what_sbatch_would_take_for_a_script_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is no option of sbatch"):
        checked([word])


def test_a_title_can_not_end_the_line() -> None:
    wanted = replace(batch(), parcels=(Parcel(attempt=1, title="x\n--wrap\x1b[31m" + "y" * 1000),))
    (comment,) = (word for word in words(wanted) if word.startswith("--comment"))
    assert comment.isprintable()
    assert len(comment) < 220
