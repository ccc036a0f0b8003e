"""Jobs that name a model: what their planner says becomes their GPUs and memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuherd.batch.assemble import BadJobFile, FileRules, assemble
from gpuherd.batch.commands_txt import read_commands
from gpuherd.batch.jobs_yaml import read_document
from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.jobs.job import ModelUse, Need, job_fields


class Planner:
    """Large models need four GPUs; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[ModelUse] = []

    def __call__(self, use: ModelUse) -> Need:
        self.asked.append(use)
        if use.batch is not None and use.batch > 100:
            raise JobCannotFit(f"{use.model} needs too much")
        return Need(4 if "70b" in use.model else 1, 30_000, f"{use.model}-family", "a sentence")


def test_each_job_of_a_file_gets_what_its_model_needs() -> None:
    text = "#gpuherd model=one-1b\na\n#gpuherd model=large-70b dtype=bf16 batch=8\nb\nc\n"
    small, large, plain = assemble(read_commands(text), FileRules(planner=Planner())).jobs
    assert (small.gpus, small.memory_mb, small.family) == (1, 30_000, "one-1b-family")
    assert (large.gpus, large.memory_mb) == (4, 30_000)
    assert (plain.gpus, plain.memory_mb, plain.family) == (1, None, None)


def test_one_use_is_planned_once_however_many_jobs_have_it() -> None:
    planner = Planner()
    text = "jobs: [{command: 'a {x}', model: large-70b, batch: 8, matrix: {x: [1, 2, 3]}}]"
    jobs = assemble(read_document(text), FileRules(planner=planner)).jobs
    assert [job.gpus for job in jobs] == [4, 4, 4]
    assert planner.asked == [ModelUse(model="large-70b", batch=8)]


def test_a_model_may_be_a_value_of_a_matrix() -> None:
    text = "jobs: [{command: 'a', model: '{m}', matrix: {m: [one-1b, large-70b]}}]"
    assert [job.gpus for job in assemble(read_document(text), FileRules(planner=Planner())).jobs] == [1, 4]


def test_memory_family_and_a_range_of_gpus_that_were_said_count() -> None:
    text = "#gpuherd model=one-1b mem=5GB family=mine gpus=1-4\na\n"
    (job,) = assemble(read_commands(text), FileRules(planner=Planner())).jobs
    assert (job.gpus, job.gpus_at_most, job.memory_mb, job.family) == (1, 4, 5_120, "mine")


def test_a_model_that_fits_nowhere_is_told_at_its_line_and_the_others_too() -> None:
    text = "#gpuherd model=a batch=101\na\n#gpuherd model=a batch=101\nb\n#gpuherd batch=8\nc\n"
    with pytest.raises(BadJobFile) as wrong:
        assemble(read_commands(text), FileRules(planner=Planner()))
    assert [(each.line, each.text) for each in wrong.value.problems] == [
        (2, "a needs too much"),
        (4, "a needs too much"),
        (6, "batch is said of a model, and no model is named"),
    ]


def test_a_job_that_shares_may_take_its_memory_from_the_plan() -> None:
    (job,) = assemble(read_commands("#gpuherd model=one-1b share\na\n"), FileRules(planner=Planner())).jobs
    assert job.share and job.memory_mb == 30_000


def test_nobody_to_plan_it_is_an_error_and_no_guess() -> None:
    with pytest.raises(UsageError, match="names a model, and nothing here can plan it"):
        job_fields({"model": "one-1b"})


def test_the_list_of_the_page_is_read_as_it_stands_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(#gpuherd default dtype.*?)^```", page, re.DOTALL | re.MULTILINE)
    planner = Planner()
    assert [job.gpus for job in assemble(read_commands(block), FileRules(planner=planner)).jobs] == [1, 4]
    assert planner.asked[1] == ModelUse(
        model="llama-3.1-70b", dtype="bf16", batch=8, prompt_tokens=2048, new_tokens=256
    )
