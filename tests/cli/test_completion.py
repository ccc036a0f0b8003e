"""Completion scripts, in real shells."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.cli.main import main
from gpuherd.jobs import Job, Queue, RunDirectory

Complete = Callable[[str], list[str]]

# What readline does: the words go to the function; where it gives nothing, -o default gives files.
_BASH = r"""
source "$1"
line=$2
COMP_LINE=$line COMP_POINT=${#line}
IFS=' ' read -ra words <<<"$line"
[[ $line == *' ' ]] && words+=("")
COMP_WORDS=("${words[@]}") COMP_CWORD=$(( ${#words[@]} - 1 ))
compopt() { :; }
eval "$(complete -p gpuherd | sed -E 's/.*-F ([^ ]+).*/function=\1/')"
$function gpuherd "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\n' "${COMPREPLY[@]}"
if [ ${#COMPREPLY[@]} = 0 ] && complete -p gpuherd | grep -q -- '-o default'; then
  compgen -f -- "${COMP_WORDS[COMP_CWORD]}"
fi
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three jobs, and files."""
    root = tmp_path_factory.mktemp("place")
    for folder, names in (("results", ["train-7", "train-8", "lr=0.1:b", "two words"]), ("own", ["mine-1"])):
        RunDirectory(root / folder).create()
        with Queue(root / folder / "queue.sqlite") as queue:
            queue.add([Job(name=name, argv=("true",)) for name in names])
    (root / "resume.csv").touch()
    (root / "models.csv").touch()
    return root


@pytest.fixture(params=["bash", "fish"])
def complete(request: pytest.FixtureRequest, place: Path, capsys: pytest.CaptureFixture[str]) -> Complete:
    """What the shell offers at the end of a line."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with pytest.raises(SystemExit):
        _run_main("completion", shell)
    script = place / f"script.{shell}"
    script.write_text(capsys.readouterr().out)
    programs = place / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "gpuherd").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuherd "$@"\n')
    (programs / "gpuherd").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "GPUHERD_QUEUE": str(place / "own")}
    environment |= {"HOME": str(place), "XDG_CONFIG_HOME": str(place / "config")}
    fish = 'source $argv[1]; complete --do-complete="$argv[2]"'
    words = ["bash", "-c", _BASH, "-"] if shell == "bash" else ["fish", "--no-config", "-c", fish]

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            [*words, str(script), line], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        return [each.partition("\t")[0].rstrip("/") for each in done.stdout.splitlines() if each]

    return offered


def _run_main(*words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpuherd", *words])
        main()


def test_commands_flags_and_choices(complete: Complete) -> None:
    assert complete("gpuherd stat") == ["status"]
    assert "--model-list" in complete("gpuherd esd --model")
    assert complete("gpuherd status --engine sl") == ["slurm"]


def test_files_where_a_file_is_meant(complete: Complete) -> None:
    assert complete("gpuherd batch mod") == ["models.csv"]
    assert complete("gpuherd esd --model-list mod") == ["models.csv"]
    assert "models.csv" in complete("gpuherd run -- python mod")


def test_folders_of_runs(complete: Complete) -> None:
    for line in ("gpuherd status res", "gpuherd status --run res", "gpuherd logs res", "gpuherd cancel res"):
        assert complete(line) == ["results"]


def test_names_of_jobs(complete: Complete) -> None:
    assert complete("gpuherd cancel min") == ["mine-1"]
    assert complete("gpuherd cancel --run results train") == ["train-7", "train-8"]
    assert complete("gpuherd retry results train-8") == ["train-8"]
    assert complete("gpuherd logs results train-") == ["train-7", "train-8"]
    assert [name.replace("\\", "") for name in complete("gpuherd pause results two")] == ["two words"]
    assert complete("gpuherd cancel --run nowhere train") == []


def test_a_tab_in_an_interactive_bash(complete: Complete, place: Path) -> None:
    """Readline itself: a file's name is completed where nothing else is offered, and a job's."""
    script = place / "script.bash"
    if not script.exists():
        pytest.skip("another shell's turn")
    environment = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
    ours, theirs = os.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], cwd=place, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ):
        os.close(theirs)
        os.write(ours, b"source script.bash\n")
        os.write(ours, b"gpuherd batch mod\t")
        seen = _read_until(ours, "models.csv")
        os.write(ours, b"\x15gpuherd cancel results train-8\t#")
        seen += _read_until(ours, "train-8 #")
        os.write(ours, b"\x15exit\n")
    assert "models.csv" in seen and "train-8 #" in seen


def _read_until(terminal: int, words: str, within_s: float = 30.0) -> str:
    seen, deadline = "", time.monotonic() + within_s
    while words not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
