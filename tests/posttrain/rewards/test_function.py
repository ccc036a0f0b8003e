"""Rewards by a function of the user's: what it is given, and what is said of each way in which it can fail."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuherd.errors import ExitCode, UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.rewards.answers import BadReward
from gpuherd.posttrain.rewards.function import FunctionName, FunctionRewards, RewardFailed, digest_of
from gpuherd.posttrain.rollout.sampler import scored
from gpuherd.posttrain.types import Problem, Split

PROBLEMS = [Problem(f"p{number}", f"{number}+1=", (str(number + 1),), {"level": str(number)}) for number in range(5)]
SAID = ["1", "2", "no", "4", "5"]

# One file with a function for each way to fail: a process takes a second to start.
FILE = """
import os, signal, subprocess, sys, time

def right(completions, *, prompts, answers, ids, level, **columns):
    print("scoring", len(completions))
    assert not columns, columns
    return [float(text in known) + int(which) / 8 for text, known, which in zip(completions, answers, level)]

def first(texts, answers):
    return tuple(text in known for text, known in zip(texts, answers))

def everything(**given):
    return [len(given)] * len(given["completions"])

def array(completions):
    return type("Array", (), {"tolist": lambda self: [0.5] * len(completions)})()

def raises(completions, **columns):
    return [1 / len(text.replace("no", "")) for text in completions]

def rambles(completions, **columns):
    raise ValueError("a bug\\nof \\x1b[31mtwo lines")

def nan(completions, **columns):
    return [float("nan") if text == "no" else 1.0 for text in completions]

def infinite(completions, **columns):
    return [10**400 for _ in completions]

def none(completions, **columns):
    return None

def nones(completions, **columns):
    return [None if text == "no" else 1 for text in completions]

def texts(completions, **columns):
    return ["1" for _ in completions]

def short(completions, **columns):
    return [1.0] * min(3, len(completions))

def leaves(completions, **columns):
    sys.exit(3)

def ends(completions, **columns):
    os._exit(7)

def dies(completions, **columns):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(completions, **columns):
    subprocess.Popen(["sleep", "600"])
    while "no" in completions:
        time.sleep(1)
    return [0] * len(completions)

def prints(completions, **columns):
    print("to the log", flush=True)
    os.write(1, b'{"rewards": [9]}\\n')
    sys.stdout.write("x" * 100_000)
    sys.stderr.write("and this\\n")
    return [1.0] * len(completions)

def pid(completions, **columns):
    return [os.getpid()] * len(completions)

def forks(completions, **columns):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(9)

def doubles(completions, **columns):
    return [float(os.fork() == 0) for _ in completions[:1]] * len(completions)

def sends(completions, **columns):
    if os.fork() == 0:
        sys.exit(0)
    return [1.0] * len(completions)

def relative(completions, **columns):
    return [len(text) / max(map(len, completions)) for text in completions]

def sees(completions, **columns):
    return [sum(name in os.environ and os.environ[name] == "" for name in ("CUDA_VISIBLE_DEVICES",))] * len(completions)

async def waits(completions, **columns):
    return [1.0]

def coroutine(completions, **columns):
    return waits(completions)

needed = 3
def needs(completions, difficulty):
    return [0.0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(FILE)
    return path


@contextmanager
def by(file: Path, function: str, timeout: float = 60) -> Iterator[FunctionRewards]:
    with FunctionRewards(f"{file}:{function}", timeout) as scoring:
        yield scoring


def values(scoring: FunctionRewards, several: int = 5) -> list[float]:
    return [each.value for each in scoring.rewards(PROBLEMS[:several], SAID[:several])]


def test_it_is_given_columns_and_batches_change_nothing(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = [1.0, 1.125, 0.25, 1.375, 1.5]
    with by(file, "right") as scoring:
        digest = scoring.check(PROBLEMS)
        assert digest == digest_of(f"{file}:right")
        assert values(scoring) == expected
        alone = [scoring.rewards([problem], [text])[0].value for problem, text in zip(PROBLEMS, SAID, strict=True)]
        back = scoring.rewards(PROBLEMS[::-1], SAID[::-1])
        assert alone == [each.value for each in back[::-1]] == expected
        assert scoring.rewards([], []) == []
        assert scoring.rewards(PROBLEMS[:1], SAID[:1])[0].correct is None
    told = capfd.readouterr()
    assert "scoring 5" in told.err and not told.out


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("first", [1, 1, 0, 1, 1]),  # completions by the first argument; a tuple of truths
        ("everything", [5] * 5),  # completions, prompts, answers, ids, level
        ("array", [0.5] * 5),
        ("sees", [1] * 5),  # no GPU: the training's are not for it
    ],
)
def test_forms_of_functions(file: Path, function: str, expected: list[float]) -> None:
    with by(file, function) as scoring:
        scoring.check(PROBLEMS)
        assert values(scoring) == expected


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            "raises",
            r"problem p2: it raised ZeroDivisionError: .* \(own\.py, line \d+\); it must return a list with one",
        ),
        ("rambles", r"problem p0: it raised ValueError: a bug of \\x1b\[31mtwo lines \(own\.py, line \d+\); it must"),
        ("nan", "problem p2: it returned nan as a reward"),
        ("infinite", r"problem p0: it returned 1000*… as a reward"),
        ("none", "problem p0: it returned None;"),
        ("nones", "problem p2: it returned None as a reward"),
        ("texts", "problem p0: it returned '1' as a reward"),
        ("short", r"problem p0 \(or one of 4 more in its batch\): it returned 3 rewards of 5 completions"),
        ("leaves", r"problem p0: it raised SystemExit \(3\)"),
        ("coroutine", "problem p0: it returned a coroutine;"),
    ],
)
def test_what_is_no_reward_is_told_in_a_sentence(file: Path, function: str, told: str) -> None:
    with by(file, function) as scoring:
        with pytest.raises(RewardFailed, match=told) as raised:
            values(scoring)
        assert str(file) in str(raised.value) and "one finite number for each completion" in str(raised.value)
        assert raised.value.exit_code is ExitCode.BAD_INPUT
        assert "\n" not in str(raised.value)


def test_a_failing_reward_is_no_wrong_answer(file: Path) -> None:
    options = TaskOptions({"digits": 1}, reward=f"{file}:raises")
    task = make_task("arithmetic", options)
    problems = task.problems(Split.TRAIN, 3, 0)
    try:
        with pytest.raises(RewardFailed, match=f"problem {re.escape(problems[1].id)}: it raised"):
            scored(task, problems, ["1", "no", "2"], batch_size=2)
    finally:
        task.close()


@pytest.mark.parametrize(
    ("function", "how"),
    [
        ("ends", "its process ended with exit code 7"),
        ("dies", "its process was ended by SIGSEGV"),
        ("forks", "its process ended with exit code 9"),
    ],
)
def test_its_death_is_told(file: Path, function: str, how: str) -> None:
    with by(file, function) as scoring:
        with pytest.raises(BadReward, match=rf"problem p0 \(or one of 4 more in its batch\): {how}") as raised:
            values(scoring)
        assert raised.value.exit_code is ExitCode.FAILED, "another try may help"


def test_what_it_forked_ends_with_it(file: Path) -> None:
    with by(file, "forks") as scoring, pytest.raises(BadReward, match="exit code 9"):
        values(scoring)
    until = time.monotonic() + 20
    while started() and time.monotonic() < until:  # a kill takes a moment
        time.sleep(0.02)
    assert not started()


def started() -> list[Path]:
    """The processes of functions that this one has started, and what they forked."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().split(b"\0")[:-1]
            if words[-1:] == [str(os.getpid()).encode()] and any(b"function_process" in each for each in words):
                found.append(path)
    return found


@pytest.mark.parametrize("function", ["doubles", "sends"])
def test_a_process_that_it_forks_replies_nothing(file: Path, function: str) -> None:
    with by(file, function) as scoring:
        first = values(scoring)
        assert [values(scoring, several) for several in (1, 2, 3)] == [first[:several] for several in (1, 2, 3)]
        assert len(set(first)) == 1


def test_a_hang_is_ended_with_all_that_it_started(file: Path) -> None:
    with by(file, "hangs", timeout=20) as scoring:
        assert values(scoring, 2) == [0, 0]
        process = scoring._process
        assert process is not None
        group = process._process.pid
        scoring._timeout = 0.3
        with pytest.raises(BadReward, match=r"longer than reward_timeout=0\.3 s for 5 completions"):
            values(scoring)
        with pytest.raises(ProcessLookupError):
            until_gone(group)
        assert values(scoring, 1) == [0], "a new one was started"


def until_gone(group: int) -> None:
    """Returns after 10 s. Raises ProcessLookupError when no process is in the group any more."""
    for _ in range(200):
        os.killpg(group, 0)
        time.sleep(0.05)


def test_prints_go_to_the_log_and_disturb_nothing(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with by(file, "prints") as scoring:
        assert values(scoring) == [1.0] * 5
        assert values(scoring) == [1.0] * 5
    told = capfd.readouterr()
    assert not told.out
    assert all(text in told.err for text in ("to the log", '{"rewards": [9]}', "x" * 100_000, "and this"))


def test_it_is_started_once_and_again_after_a_death(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with by(file, "pid") as scoring:
        one = int(values(scoring, 1)[0])
        assert int(values(scoring)[0]) == one != os.getpid()
        os.kill(one, signal.SIGKILL)
        assert scoring._process is not None
        while not scoring._process.has_ended:  # a zombie's other threads may still end
            time.sleep(0.05)
        assert int(values(scoring)[0]) != one
    assert "was ended by SIGKILL between two batches; started again" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(one, 0)


def test_a_reward_that_depends_on_its_batch_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with by(file, "relative") as scoring:
        assert values(scoring) == [0.5, 0.5, 1.0, 0.5, 0.5]
        values(scoring)
    warned = [each.getMessage() for each in caplog.records]
    assert len(warned) == 1 and "0.5 in a batch and 1.0 alone" in warned[0]


def test_what_is_no_function_is_refused_before_it_is_called(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("own.py", "own.py:", ":score", "a b:score", "own.py:a.b", "/own:score"):
        with pytest.raises(UsageError, match=r"is no function; write package\.module:function or path/to/file\.py"):
            FunctionName.of(text)
    with pytest.raises(UsageError, match=r"there is no file /.*/nowhere\.py"):
        make_task("arithmetic", TaskOptions(reward="nowhere.py:score"))
    with pytest.raises(UsageError, match="reward_timeout=0; seconds above 0"):
        make_task("arithmetic", TaskOptions(reward=f"{file}:right", reward_timeout=0))
    for name, told in [
        ("missing", r"has no function missing; it has right, first, "),
        ("needed", "needed is no plain function but int"),
        ("waits", "waits is no plain function but async"),
        ("needs", "it needs an argument difficulty, and the data set has completions, prompts, answers, ids, level"),
    ]:
        with by(file, name) as scoring, pytest.raises(UsageError, match=rf"reward /.*own\.py:{name}: .*{told}"):
            scoring.check(PROBLEMS)
    monkeypatch.chdir(tmp_path)
    broken = {
        "syntax": "def score(:",
        "raising": "1/0",
        "leaving": "raise SystemExit(4)",
        "dying": "import os; os._exit(5)",
    }
    for name, text in broken.items():
        Path(f"{name}.py").write_text(text)
    for place, told in [
        ("syntax.py", r"can't be imported: SyntaxError: .*line 1"),
        ("raising", r"can't be imported: ZeroDivisionError: division by zero \(raising\.py, line 1\)"),
        ("leaving", r"can't be imported: SystemExit \(4\)"),
        ("dying", "importing it ended the process: it ended with exit code 5"),
        ("nowhere.at_all", "can't be imported: ModuleNotFoundError"),
    ]:
        with FunctionRewards(f"{place}:score", 60) as scoring, pytest.raises(UsageError, match=told):
            scoring.check()


def test_a_module_of_the_folder_imports_its_neighbours_and_is_not_imported_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")  # gpuherd's own imports are not its
    (tmp_path / "lengths.py").write_text("def length(text):\n    return len(text)\n")
    (tmp_path / "by_length.py").write_text(
        "from dataclasses import dataclass\nfrom lengths import length\n\n"
        "@dataclass\nclass Unit:\n    value: float = 1.0\n\n"
        "def score(completions):\n    return [length(each) * Unit().value for each in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    for place in ("by_length", "by_length.py"):
        with FunctionRewards(f"{place}:score", 60) as scoring:
            assert values(scoring) == [1, 1, 2, 1, 1]
    assert "by_length" not in sys.modules


def test_another_file_is_another_reward(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def score(completions):\n    return [1] * len(completions)\n")
    with FunctionRewards(f"{path}:score", 60) as scoring:
        before = scoring.check()
        scoring.close()
        path.write_text("def score(completions):\n    return [2] * len(completions)\n")
        with pytest.raises(UsageError, match=r"mine\.py:score has changed since this run began"):
            values(scoring)
        scoring.sha256 = None
        assert values(scoring) == [2] * 5 and scoring.sha256 != before


def test_columns_of_a_file_are_given_to_it(file: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {number}", "level": number, "tags": ["a", number]} for number in range(20)]
    rows[7]["only_here"] = "x"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    own = tmp_path / "columns.py"
    own.write_text(
        "def score(completions, *, level, tags, only_here, prompt, prompts):\n"
        "    assert prompts == [f'Q: {each}' for each in prompt]\n"
        "    return [n + (tag == ['a', n]) / 2 + 100 * (here == 'x') for n, tag, here in zip(level, tags, only_here)]\n"
    )
    task = make_task(str(path), TaskOptions({"template": "Q: {prompt}"}, reward=f"{own}:score"))
    try:
        problems = task.problems(Split.TRAIN, None, 0)
        assert not task.verifiable and all(not each.answers for each in problems)
        task.scoring.check(problems)  # type: ignore[attr-defined]
        found = {each.prompt: scored(task, [each], ["x"])[0].value for each in problems}
    finally:
        task.close()
    expected = {f"Q: say {n}": n + 0.5 + 100 * (n == 7) for n in range(20)}
    assert found == {prompt: expected[prompt] for prompt in found} and len(found) == 16


def test_two_things_that_score_are_refused(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(UsageError, match="reward and reward_model both say what scores"):
        TaskOptions(reward=f"{file}:right", reward_model="org/model")
    with pytest.raises(UsageError, match="reward_timeout=5 is of a reward function"):
        TaskOptions(reward_timeout=5)
    with pytest.raises(UsageError, match=r"leave settings\.reward and label out"):
        make_task(str(path), TaskOptions({"reward": "math"}, reward=f"{file}:right"))
    with pytest.raises(UsageError, match="reward is of env_type task; math says itself"):
        EnvironmentOptions("math", dataset="gsm8k", task=TaskOptions(reward=f"{file}:right"))


def test_it_ends_with_the_process_that_started_it(file: Path) -> None:
    program = (
        "from gpuherd.posttrain.rewards.function import FunctionRewards\n"
        "from gpuherd.posttrain.types import Problem\n"
        f"scoring = FunctionRewards('{file}:pid', 60)\n"
        "print(int(scoring.rewards([Problem('a', 'b')], ['c'])[0].value), flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    with pytest.raises(ProcessLookupError):
        until_gone(child)
