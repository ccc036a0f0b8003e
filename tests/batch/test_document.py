"""jobs.yaml: settings, matrices, lines in errors, and documents that mean harm."""

from __future__ import annotations

import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.batch.assemble import BadJobFile, assemble
from gpuherd.batch.jobs_yaml import read_document, read_engine
from gpuherd.jobs.job import Job


def jobs(text: str, *, shell: bool = False) -> tuple[Job, ...]:
    return assemble(read_document(text, shell=shell)).jobs


def problems(text: str, *, shell: bool = False) -> list[tuple[int, str]]:
    with pytest.raises(BadJobFile) as told:
        jobs(text, shell=shell)
    return [(problem.line, problem.text) for problem in told.value.problems]


def test_a_misspelt_command_is_found() -> None:
    assert problems("jobs: [{comand: echo}]") == [(1, "a job without a command; did you mean it by 'comand'?")]
    assert problems("jobs: [{cmd: echo}]") == [(1, "a job without a command; did you mean it by 'cmd'?")]
    assert problems("jobs: [{mem: 1GB}]") == [(1, "a job without a command")]


def test_what_is_wrong_with_the_engine_is_told_with_all_else() -> None:
    text = "engine:\n  name: slurm\n  partitoin: gpu\njobs: [{comand: echo}]"
    first, second = problems(text)
    assert first == (1, first[1]) and first[1].startswith("engine.partitoin is no option of an engine; did you mean")
    assert second[0] == 4
    assert read_engine(text) == {} == read_engine("engine: [") == read_engine("jobs: [engine]") == read_engine("")
    assert len(jobs("engine:\njobs: [echo]")) == 1
    told = "engine: {name: slurm, time-limit: 1h, setup: [module load cuda, date]}\njobs: [echo]"
    assert read_engine(told) == {"engine": "slurm", "time_limit": 3600.0, "setup": ("module load cuda", "date")}


def test_a_matrix_with_include_and_exclude() -> None:
    text = """\
defaults: {mem: 20GB, retries: 2, env: {A: no}}
jobs:
  - name: train
    command: SEED={seed} python train.py --lr {lr} --name '{lr} x' {{lr}} --json {"a":{"b":1}}
    matrix: {lr: [0.10, 1e-3], seed: [1, two words]}
    exclude: [{lr: 1e-3, seed: 1}]
    include: [{seed: 9, lr: 7}, {lr: 0.10, seed: 1}]
    env: {B: "{lr}"}
  - command: [python, evaluate.py, "two words", "{lr}"]
    needs: [train]
    mem:
"""
    *trained, evaluated = jobs(text)
    assert [job.name for job in trained] == [
        "train-lr0.10-seed1",
        "train-lr0.10-seedtwo-words-a03f1d61",
        "train-lr1e-3-seedtwo-words-a03f1d61",
        "train-lr7-seed9",
    ]
    words = ("python", "train.py", "--lr", "0.10", "--name", "0.10 x", "{lr}", "--json", "{a:{b:1}}")
    assert trained[1].argv == words  # the value with a blank in it went nowhere near the words
    assert trained[1].env == {"A": "no", "B": "0.10", "SEED": "two words"}
    assert trained[0].memory_mb == 20480
    assert evaluated.argv == ("python", "evaluate.py", "two words", "{lr}")
    assert evaluated.needs == tuple(job.name for job in trained)
    assert evaluated.name == "job-0002"
    assert evaluated.memory_mb == 20480


def test_a_value_is_one_word_whatever_is_in_it() -> None:
    (job,) = jobs("jobs: [{command: 'echo {x}', matrix: {x: [\"a b; $(touch owned) '\"]}}]")
    assert job.argv == ("echo", "a b; $(touch owned) '")


def test_a_value_never_becomes_a_part_of_a_shell_line() -> None:
    line = "jobs: [{command: 'echo {x} > out', matrix: {x: [%s]}}]"
    assert jobs(line % "0.1", shell=True)[0].argv == ("/bin/sh", "-c", "echo 0.1 > out")
    [(number, told)] = problems(line % "'a; touch owned'", shell=True)
    assert number == 1
    assert "give command as a list" in told


def test_rounds_are_jobs_one_after_the_other() -> None:
    found = jobs("jobs: [{name: r, command: 'echo {round} {x}', rounds: 2, round: 5, matrix: {x: [a, b]}}]")
    assert [(job.name, job.argv[1:], job.round) for job in found] == [
        ("r-xa-round1", ("1", "a"), 5),
        ("r-xb-round1", ("1", "b"), 5),
        ("r-xa-round2", ("2", "a"), 6),
        ("r-xb-round2", ("2", "b"), 6),
    ]


def test_names_with_places_and_names_of_nobody() -> None:
    found = jobs(
        "jobs: [{name: 'a-{x}', command: c, matrix: {x: [1, 2]}}, {command: 'secret {x}', matrix: {x: [1, 2]}}]"
    )
    assert [job.name for job in found] == ["a-1", "a-2", "job-0002-0001", "job-0002-0002"]


def test_a_list_of_words_json_and_anchors() -> None:
    assert [job.argv for job in jobs("- python a.py\n- command: b\n")] == [("python", "a.py"), ("b",)]
    assert jobs('{"jobs": [{"command": ["a", "b c"], "gpus": 2, "mem": null}]}')[0].argv == ("a", "b c")
    text = "x: &base {gpus: 2, mem: 1GB}\njobs:\n  - {<<: *base, mem: 2GB, command: a}\n"
    assert problems(text) == [(1, "unknown key 'x'; possible: engine, defaults, jobs")]
    text = "defaults: &base {gpus: 2, mem: 1GB}\njobs:\n  - {<<: *base, mem: 2GB, command: a}\n"
    assert [(job.gpus, job.memory_mb) for job in jobs(text)] == [(2, 2048)]


def test_all_errors_are_told_at_once_with_their_lines() -> None:
    text = """\
default: {}
jobs:
  - cmd: x
  - command: a | b
    gpu: 2
    mem: lots
  - command: echo {lrr}
    matrix: {lr: [1]}
  - command: y
    matrix: {lr: [1, 1]}
  - command: y
    matrix: {lr: [1]}
    exclude: [{lr: 1}]
  - command: y
    matrix: {lr: [1], seed: [1]}
    include: [{lr: 2}]
  - command: y
    rounds: many
  - [command, y]
  - command: y
    env: {CUDA_VISIBLE_DEVICES: 1}
"""
    told = problems(text)
    assert [line for line, _ in told] == [1, 3, 4, 5, 6, 7, 10, 11, 16, 18, 19, 21]
    by_line = dict(told)
    assert "did you mean defaults?" in by_line[1]
    assert "'cmd'" in by_line[3]
    assert "did you mean {lr}?" in by_line[7]
    assert "seed" in by_line[16]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("jobs: [{command: a, command: b}]", 1, "twice"),
        ("jobs:\n  - command: !!python/object/apply:os.system ['touch owned']\n", 2, "tag"),
        ("jobs: &a [*a]", 1, "*a refers to nothing"),
        ("jobs: [*nobody]", 1, "*nobody"),
        ("jobs:\n\t- a", 2, "no YAML"),
        ("jobs: [a\n", 0, "no YAML"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("", 0, "nothing is in it"),
        ("jobs: []", 1, "no jobs"),
        ("? [a]\n: b\n", 1, "a key must be a word"),
        ("jobs: [{command: a, needs: zz}]", 1, "no such job"),
        ("[" * 200_000, 1, "nested"),
        ("jobs: [{command: a, matrix: {round: [1]}}]", 1, "round is taken"),
        ("jobs: [{command: 'a\0b'}]", 0, "no YAML"),
    ],
)
def test_what_is_refused(text: str, line: int, told: str) -> None:
    found = problems(text)
    assert told in found[0][1]
    if line:
        assert found[0][0] == line


def test_a_matrix_of_a_thousand_million_and_a_bomb_of_anchors_are_refused_at_once() -> None:
    began = time.process_time()
    axes = ", ".join(f"k{i}: *a" for i in range(9))
    text = f"defaults: {{}}\njobs: [{{command: x, matrix: {{k: &a [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], {axes}}}}}]"
    assert "10000000000 jobs" in problems(text)[0][1]
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    assert problems(bomb + "jobs: *a11\n")
    deep = "jobs: [{command: x, rounds: 10000, matrix: {a: &a [" + ", ".join(map(str, range(900))) + "]}}]"
    assert "9000000 jobs" in problems(deep)[0][1]
    assert time.process_time() - began < 2


KEYS = ["jobs", "command", "matrix", "defaults", "include", "exclude", "rounds", "name", "needs", "env", "lr", "mem"]
WORDS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)


def nested(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)


@given(st.recursive(WORDS, nested, max_leaves=20))
def test_any_document_gives_jobs_or_problems(document: object) -> None:
    try:
        found = jobs(yaml.safe_dump(document))
    except BadJobFile as told:
        assert told.problems
    else:
        assert found
