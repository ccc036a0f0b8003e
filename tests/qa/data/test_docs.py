"""docs/questions.md tells the truth: data sets, styles, and answers that attempt nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuherd.options import option_fields, spellings
from gpuherd.qa.data.load import QuestionOptions
from gpuherd.qa.data.readers.registry import dataset_readers
from gpuherd.qa.grading.rules import RULES, attempts_nothing
from gpuherd.qa.prompts.maker import STYLES, PromptOptions, style_named
from gpuherd.qa.record import Question

TEXT = (Path(__file__).parents[3] / "docs" / "questions.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The table whose heading begins like this: first cell, without what stands behind its code, to the other cells."""
    lines = TEXT[TEXT.index(heading) :].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {cells[0].partition("`")[2].partition("`")[0]: cells[1:] for cells in table}


def test_the_table_of_data_sets_has_them_all() -> None:
    table = rows("| `--dataset` |")
    assert set(table) == set(dataset_readers())
    for name, adapter in dataset_readers().items():
        hub_id, split, examples, _ = table[name]
        assert hub_id == (f"{adapter.hub_id}, {adapter.config}" if adapter.config else adapter.hub_id)
        assert split == adapter.split
        assert examples == (adapter.few_shot_split or "the same")
        assert name in QuestionOptions.__dataclass_fields__["dataset"].metadata["option"].help


def test_the_table_of_styles_has_their_stop_strings() -> None:
    table = rows("| style |")
    assert set(table) == set(STYLES)
    for name in STYLES:
        told = re.findall("`([^`]*)`", table[name][-1])
        assert tuple(each.replace(r"\n", "\n") for each in told) == style_named(name).stop


def test_every_flag_is_in_the_text() -> None:
    for options in (QuestionOptions, PromptOptions):
        for field, spec in option_fields(options):
            (flag,), _ = spellings(field.name, spec)
            assert flag in TEXT, flag


def test_the_judges_and_their_thresholds() -> None:
    table = rows("| judge |")
    assert set(table) == {*RULES, "math"}
    for name, rule in RULES.items():
        assert (rule.threshold is None) != (str(rule.threshold) in table[name][0])


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "I don't really know",
            "I have no idea.",
            "no idea",
            "I'm not sure",
            "unsure",
            "I am uncertain",
            "I can't say",
        ),
        *(
            "I cannot tell",
            "not known",
            "unanswerable",
            "No answer.",
            "It cannot be determined.",
            "It cannot be answered",
        ),
        *("idk", "n/a", "Sorry, I don't know", "Unfortunately, I don't know that", "Well, I don't know the question"),
        *(
            "I don't know, sorry",
            "It's unknown",
            "The answer is not known.",
            "There is no answer",
            "I'm not sure about it",
        ),
    ],
)
def test_the_forms_that_attempt_nothing(answer: str) -> None:
    assert attempts_nothing(answer, Question("1", "?", ("Paris",)))
