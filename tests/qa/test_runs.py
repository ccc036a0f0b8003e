"""A run is opened as what it is: complete and unchanged, or told as what is wrong with it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.qa.generate.conftest import begin_run

from gpuherd.cli.main import run as gpuherd
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.models.checkpoints.stored import FileStamp
from gpuherd.models.load import identity
from gpuherd.qa.folder import FORMAT
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.runs import (
    DamagedRun,
    NewerRun,
    NoSuchRun,
    RunState,
    UnfinishedRun,
    list_runs,
    open_run,
    run_of_path,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """A folder with a complete run ``facts`` and one ``half`` that has begun."""
    root = tmp_path_factory.mktemp("runs")
    data = root / "two.jsonl"
    data.write_text('{"question": "What is 4 plus 3?", "answers": ["7"]}\n{"question": "Who?", "answers": ["me"]}\n')
    for name in ("facts", "half"):
        begun = begin_run(
            GenerateConfig(
                model=str(trained),
                dataset=str(data),
                runs_dir=str(root / "runs"),
                run_id=name,
                max_new_tokens=4,
                batch_size=1,
            )
        )
        if name == "facts":
            begun.answer()
            begun.finish()
    return root / "runs"


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(path: Path, kind: type[GpuherdError], told: str) -> None:
    with pytest.raises(kind, match=told):
        list(run_of_path(path).answers())


def test_a_complete_run(made: Path) -> None:
    run = open_run("facts", made)
    answers = list(run.answers())
    assert [each.number for each in answers] == [0, 1] and run.questions == 2
    assert answers[0].question.question == "What is 4 plus 3?"
    assert run.run_id == "facts" and run.config["max_new_tokens"] == 4
    assert open_run(str(made / "facts"), "elsewhere").answers_sha256 == run.answers_sha256


def test_a_run_that_is_not_there(made: Path, tmp_path: Path) -> None:
    for name, told in (
        ("fact", r"did you mean facts\?"),
        ("hlaf", r"did you mean half\?"),
        ("xyz", "gpuherd runs lists all"),
        ("../runs/facts/../nothing", "there is no run"),
        ("", "there is no run"),
        ("..", "there is no run"),
        ("a\0b", "there is no run"),
        ("x" * 300, "there is no run"),
    ):
        with pytest.raises(NoSuchRun, match=told) as problem:
            open_run(name, made)
        assert problem.value.exit_code is ExitCode.MISSING
    with pytest.raises(NoSuchRun, match="gpuherd generate makes one"):
        open_run("facts", tmp_path)


def test_a_run_that_is_half_written(made: Path) -> None:
    with pytest.raises(UnfinishedRun, match=r"gpuherd generate --resume half --runs-dir \S*runs goes on"):
        open_run("half", made)


def test_the_command_that_goes_on_can_be_pasted(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "half", tmp_path / "my runs" / "half")
    with pytest.raises(UnfinishedRun) as problem:
        run_of_path(folder)
    said = str(problem.value)
    words = shlex.split(said[said.index("gpuherd") : said.index(" goes on")])
    assert words == ["gpuherd", "generate", "--resume", "half", "--runs-dir", str(tmp_path / "my runs")]


def test_a_folder_that_is_no_run(made: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    refused(tmp_path / "other", NoSuchRun, "has no run.json")
    (tmp_path / "other" / "run.json").write_text('{"command": ["gpuherd", "esd"]}')
    refused(tmp_path / "other", NoSuchRun, "of another command")


def test_a_run_of_a_newer_version(runs: Path) -> None:
    for name in ("run.json", "done.json"):
        path = runs / "facts" / name
        before = path.read_text()
        change(path, format=FORMAT + 1)
        refused(runs / "facts", NewerRun, rf"format {FORMAT + 1}, of a newer gpuherd; this one reads up to {FORMAT}")
        path.write_text(before)


def test_answers_that_were_changed(runs: Path) -> None:
    answers = runs / "facts" / "answers.jsonl"
    whole = answers.read_bytes()
    first, second = whole.splitlines(keepends=True)
    for spoilt, told in (
        (first, "it has 1 answers and should have 2"),
        (whole[:-9], "line 2: no record"),
        (second + first, "line 1 is the answer to question 1"),
        (first + b"\xff\xfe" + second[2:], "line 2: no record"),
        (whole.replace(b'"text":" 7"', b'"text":" 8"', 1), "it was changed after it had been finished"),
        (b"", "it has 0 answers"),
    ):
        answers.write_bytes(spoilt)
        refused(runs / "facts", DamagedRun, told)
    answers.unlink()
    refused(runs / "facts", DamagedRun, "can't be read")


def test_records_that_are_spoilt(runs: Path) -> None:
    run_json, done = runs / "facts" / "run.json", runs / "facts" / "done.json"
    before = done.read_text()
    for text, told in (("{", "no JSON"), ("[]", "not what gpuherd writes"), ("{}", "in which format")):
        done.write_text(text)
        refused(runs / "facts", DamagedRun, told)
    done.write_text(before)
    change(done, answers_sha256=None)
    refused(runs / "facts", DamagedRun, "says nothing of answers_sha256")
    change(run_json, config=None)
    refused(runs / "facts", DamagedRun, "doesn't say what was asked")


def test_the_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "facts" / "judgments").mkdir()
    (runs / "facts" / "judgments" / "exact-0a1b2c3d.json").write_text("{}")
    (runs / "facts" / "judgments" / "math-00000000.jsonl").write_text("")  # not finished: it has no .json yet
    shutil.copytree(runs / "facts", runs / "bad")
    (runs / "bad" / "done.json").write_text("?")
    (runs / "not-a-run").mkdir()
    lines = {line.run_id: line for line in list_runs(runs)}
    assert {name: line.state for name, line in lines.items()} == {
        "facts": RunState.COMPLETE,
        "half": RunState.UNFINISHED,
        "bad": RunState.DAMAGED,
    }
    assert (lines["facts"].questions, lines["facts"].answered) == (2, 2)
    assert (lines["half"].questions, lines["half"].answered) == (2, 0)
    # Of a damaged one nobody knows it: the lines of its shards went when it was complete.
    assert (lines["bad"].questions, lines["bad"].answered) == (2, None)
    assert lines["facts"].judgings == ("exact-0a1b2c3d",)
    assert gpuherd(["runs", "--runs-dir", str(runs)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "0/2" in told and "exact-0a1b2c3d" in told and "no JSON" in told
    assert gpuherd(["runs", "--runs-dir", str(runs), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert {each["run_id"] for each in found} == lines.keys()


def test_no_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoSuchRun, match="--runs-dir names the one"):
        gpuherd(["runs", "--runs-dir", str(tmp_path / "nowhere")])
    assert gpuherd(["runs", "--runs-dir", str(tmp_path)]) == ExitCode.OK
    assert "gpuherd generate makes one" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet", "questions.jsonl", "prompts.jsonl"])
def test_damage_that_keeps_the_size_is_listed_and_refused(
    runs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening a run looks at sizes alone; the list of runs, and the command that would go on, look at every byte."""
    path = runs / "facts" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (line,) = [each for each in list_runs(runs) if each.run_id == "facts"]
    assert line.state is RunState.DAMAGED and name in str(line.problem)
    with pytest.raises(DamagedRun, match=name):
        gpuherd(["generate", "--resume", "facts", "--runs-dir", str(runs)])


def test_the_list_reads_a_finished_file_again_only_where_it_has_changed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "_SMALL", 0)
    monkeypatch.setattr(identity, "_SETTLED_NS", -(10**18))
    read: list[str] = []
    hashed = identity._hash

    def noted(stamp: FileStamp, *rest: Any) -> str:
        read.append(stamp.path.name)
        return hashed(stamp, *rest)

    monkeypatch.setattr(identity, "_hash", noted)

    def state() -> str:
        read.clear()
        assert gpuherd(["runs", "--runs-dir", str(runs), "--json"]) == ExitCode.OK
        return str({each["run_id"]: each["state"] for each in json.loads(capsys.readouterr().out)}["facts"])

    assert state() == "complete" and "answers.jsonl" in read and len(read) == 4
    assert state() == "complete" and read == []
    path = runs / "facts" / "questions.jsonl"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    assert state() == "damaged" and read == ["questions.jsonl"]
    path.unlink()
    assert state() == "damaged"
