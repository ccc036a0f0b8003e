"""The program as a whole: help, version, unknown words, exit codes, start-up imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forking import Forking

from gpuherd import __version__
from gpuherd.cli import COMMANDS
from gpuherd.cli.main import main, run
from gpuherd.errors import ExitCode, UsageError
from gpuherd.gpus.visible import without
from gpuherd.runs.console import configure_console

# Anything of these in a bare start would cost more than the whole budget of `gpuherd --help`.
HEAVY = ("torch", "numpy", "scipy", "rich", "psutil", "sqlite3", "huggingface_hub", "shtab")


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gpuherd(forking_gpuherd: Forking) -> Command:
    """The program in a process of its own."""
    return lambda *words: forking_gpuherd.start(module="gpuherd", words=words).end()


def test_help_lists_every_command_with_examples(gpuherd: Command) -> None:
    shown = gpuherd("--help")
    assert shown.returncode == ExitCode.OK
    for command in COMMANDS:
        group, _, tool = command.partition(" ")
        lines = shown.stdout if not tool else gpuherd(group, "--help").stdout
        assert f"\n    {tool or group}" in lines
    assert "gpuherd esd --model-list models.csv" in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(gpuherd: Command, command: str) -> None:
    shown = gpuherd(*command.split(), "--help")
    assert shown.returncode == ExitCode.OK
    assert f"gpuherd {command}" in shown.stdout.split("example", 1)[1]


def test_version(gpuherd: Command) -> None:
    assert gpuherd("--version").stdout == f"gpuherd {__version__}\n"


def test_no_command_prints_help_and_fails(gpuherd: Command) -> None:
    shown = gpuherd()
    assert shown.returncode == ExitCode.USAGE
    assert "usage: gpuherd" in shown.stdout


def test_an_unknown_flag_of_a_command_names_the_nearest(gpuherd: Command) -> None:
    shown = gpuherd("gpus", "--jsn")
    assert shown.returncode == ExitCode.USAGE
    assert "did you mean --json?" in shown.stderr


def test_an_unknown_command_names_the_nearest(gpuherd: Command) -> None:
    for words in (["sumbit", "--", "x"], ["--simulate", "2x40GB", "sumbit"], ["--simulate=2x40GB", "sumbit"]):
        shown = gpuherd(*words)
        assert shown.returncode == ExitCode.USAGE
        assert "unknown command 'sumbit'; did you mean submit?" in shown.stderr


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from gpuherd.cli.main import build_parser\n"
        "build_parser()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_a_plan_of_a_known_model_loads_no_training_and_nothing_heavy() -> None:
    """A cold ``gpuherd plan`` is quick because it loads little: nothing of trainings, of --check or of model files."""
    program = (
        "import json, sys\n"
        "from gpuherd.cli.main import run\n"
        "run(['plan', 'llama-3.1-70b', *sys.argv[1:]])\n"
        "print(json.dumps([name for name in sys.modules]))"
    )

    def loaded(*words: str) -> list[str]:
        shown = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        names: list[str] = json.loads(shown.stdout.splitlines()[-1])
        return names

    def unwanted(names: list[str]) -> set[str]:
        heavy = {"transformers", "tokenizers", "requests", "importlib.metadata", *HEAVY} & set(names)
        rooms = ("gpuherd.models.load", "gpuherd.models.checkpoints", "gpuherd.models.lora", "gpuherd.models.tensors")
        ours = {name for name in names if name.startswith(rooms)}
        return heavy | ours | {name for name in names if name.startswith("gpuherd.models.") and "training" in name}

    assert unwanted(loaded()) == set()
    assert unwanted(loaded("--gpus", "4x40GB")) == set()
    trained = unwanted(loaded("--gpus", "8x80GB", "--train", "sft", "--strategy", "fsdp"))
    assert {"gpuherd.models.place.training", "gpuherd.models.place.training_page"} <= trained


def test_the_list_of_commands_loads_none_of_them() -> None:
    program = (
        "import sys\n"
        "from gpuherd.cli.main import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name.startswith(('gpuherd.esd', 'gpuherd.batch', 'gpuherd.cli.esd'))])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


def test_submit_loads_nothing_of_gpus_and_decisions(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from gpuherd.cli.main import run\n"
        "code = run(['submit', '--', 'true'])\n"
        "heavy = ('gpuherd.gpus', 'gpuherd.jobs.scheduler.types', 'rich')\n"
        "print([code] + [name for name in heavy if name in sys.modules])"
    )
    # A test before this one may have left GPUs hidden, which submit then has to take away.
    environment = {**without(os.environ), "GPUHERD_QUEUE": str(tmp_path / "queue")}
    words = [sys.executable, "-c", program]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.splitlines()[-1] == "[0]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts_name_the_commands(gpuherd: Command, shell: str) -> None:
    shown = gpuherd("completion", shell)
    assert shown.returncode == ExitCode.OK, shown.stderr
    assert "doctor" in shown.stdout


def test_completion_completes_in_bash(gpuherd: Command) -> None:
    script = gpuherd("completion", "bash").stdout
    program = script + '\nCOMP_WORDS=(gpuherd doc); COMP_CWORD=1; _shtab_gpuherd; echo "${COMPREPLY[@]}"'
    program += '\nCOMP_WORDS=(gpuherd batch --engine ""); COMP_CWORD=3; _shtab_gpuherd; echo "${COMPREPLY[@]}"'
    shown = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert shown.stdout.splitlines() == ["doctor", "local slurm ray gridengine"], shown.stderr


def test_an_unknown_log_level_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "LOUD")
    with pytest.raises(UsageError, match="LOUD"):
        configure_console()


@pytest.mark.parametrize(
    "words", [("gpus",), ("gpus", "--json"), pytest.param(("completion", "bash"), marks=pytest.mark.slow)]
)
def test_nobody_may_read_and_the_streams_may_be_closed(words: tuple[str, ...]) -> None:
    def shell(how: str) -> subprocess.CompletedProcess[str]:
        line = f'"$@" {how}'
        command = ["sh", "-c", line, "sh", sys.executable, "-m", "gpuherd", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for how in (">&-", "<&- >&- 2>&-"):
        ended = shell(how)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    full = shell(">/dev/full")
    assert full.returncode == ExitCode.CANNOT_WRITE
    assert full.stderr == "gpuherd: can't write the output: No space left on device\n"
    assert shell(">/dev/full 2>&1").returncode == ExitCode.CANNOT_WRITE
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gpuherd", *words]
    gone = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        "submit --json --needs nobody -- true",
        "submit --json --dry-run --needs nobody -- true",
        "run --json --dry-run -- no-such-program-anywhere",
        "gpus --json --run nowhere",
        "status --json nowhere",
        "logs --json nowhere job",
        "cancel --json --run nowhere --all",
        "cancel --json",
        "set --json",
        "simulate --json nowhere",
        "batch --json nowhere.txt",
        "esd --json --model-list nowhere.csv",
        "up --json --gpus 17",
    ],
)
def test_with_json_an_error_is_json_too(
    gpuherd: Command, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "queue"))
    monkeypatch.chdir(tmp_path)  # some make their folder before they look at the file
    ran = gpuherd(*words.split())
    told = json.loads(ran.stdout)
    assert ran.returncode == told["exit_code"] != 0
    assert ran.stderr.splitlines()[-1].removeprefix("gpuherd: ") == told["error"]


@pytest.mark.parametrize("words", ["submit -- true", "batch /dev/null", "status nowhere"])
def test_a_folder_that_is_gone_is_told(words: str, tmp_path: Path) -> None:
    line = f'mkdir "$0/gone" && cd "$0/gone" && rmdir "$0/gone" && exec "$@" {words}'
    command = ["sh", "-c", line, str(tmp_path), sys.executable, "-P", "-m", "gpuherd"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.USAGE
    assert ran.stderr == "gpuherd: the current folder was removed; go to another one with cd\n"


@pytest.mark.parametrize(
    "words",
    ["status --json --nosuch", "nosuch --json", "esd --max-gpus x --json", "batch --json", "drain a --run b --json"],
)
def test_with_json_a_wrong_word_is_told_as_json_too(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words.split())
    told = capsys.readouterr()
    assert ended.value.code == ExitCode.USAGE
    assert json.loads(told.out)["exit_code"] == ExitCode.USAGE
    assert json.loads(told.out)["error"] in told.err


def test_json_of_the_command_behind_the_dashes_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["run", "--nosuch", "--", "python", "--json"])
    assert capsys.readouterr().out == ""


class Wrong(Exception):
    """Nothing that gpuherd foresees."""


@pytest.mark.parametrize(
    "problem", [Wrong("of a kind\nof its own"), PermissionError(13, "Permission denied"), RecursionError()]
)
@pytest.mark.parametrize("as_json", [True, False])
def test_an_exception_that_nothing_foresaw_is_a_sentence_and_a_file(
    problem: Exception,
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(_: object) -> int:
        raise problem

    monkeypatch.setattr("gpuherd.cli.doctor.run_doctor", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpuherd", "doctor", *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == ExitCode.FAILED
    (file,) = tmp_path.iterdir()
    assert told.err.count("\n") == 1 and type(problem).__name__ in told.err and str(file) in told.err
    assert "Traceback" not in told.err and "goes on from here" in told.err
    assert "in fails" in file.read_text() and "gpuherd doctor" in file.read_text()
    assert not as_json or json.loads(told.out)["exit_code"] == ExitCode.FAILED


def test_a_default_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            run([*command.split(), "--help"])
        told = " ".join(capsys.readouterr().out.split())
        assert not re.findall(r"\(default[^()]*\) \(default[^()]*\)", told), command


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_what_the_encoding_of_the_output_lacks_ends_nothing(tmp_path: Path, encoding: str) -> None:
    """A job's own words may hold anything, and a run must not end for one of them."""
    jobs, folder = tmp_path / "jobs.txt", tmp_path / "run"
    script = 'printf "ValueError: \\342\\206\\222 \\316\\261\\n"; exit 3'
    jobs.write_text(f"sh -c '{script}'\nsleep 0.3\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}

    def shown(*words: str) -> str:
        command = [sys.executable, "-m", "gpuherd", *words]
        found = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert b"Traceback" not in found.stderr
        return found.stdout.decode("latin-1")

    out = shown("batch", str(jobs), "--gpus-per-job", "0", "--retries", "0", "--output-dir", str(folder))
    assert "\\u2192" in out and "line-0002: done" in out
    assert "\\u2192" in shown("status", str(folder))
    assert "ValueError" in shown("logs", str(folder), "line-0001")  # through a pipe: byte for byte
    assert "\\u2026" in shown("simulate", "--help")


def test_standard_input_that_is_closed_is_an_empty_job_file() -> None:
    command = f"{sys.executable} -m gpuherd batch - <&-"
    found = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (found.returncode, "Traceback" in found.stderr) == (ExitCode.BAD_INPUT, False), found.stderr
