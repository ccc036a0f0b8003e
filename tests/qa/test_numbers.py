"""Numbers are compared as numbers, by rules and between samples, and chosen so where references are numbers."""

from __future__ import annotations

import string
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.qa.grading.conftest import answered, write_run

from gpuherd.cli.main import run as gpuherd
from gpuherd.errors import UsageError
from gpuherd.qa.generate.experiment import done_lines
from gpuherd.qa.grading.formulas import same_results
from gpuherd.qa.grading.rules import RULES, normalised
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.measures import rouge
from gpuherd.qa.numbers import mostly_numbers, number_of, rule_for, spelt
from gpuherd.qa.record import Question
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.scoring.score import ScoringStage
from gpuherd.runs.records import line_of

RIGHT, WRONG = Verdict.CORRECT, Verdict.INCORRECT


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        ("15", "1.5", WRONG),
        ("3", "-3", WRONG),
        ("-3", "3", WRONG),
        ("-3", "\u22123", RIGHT),
        ("1500", "1500.00", RIGHT),
        ("1,500", "$1500", RIGHT),
        ("1/2", "0.5", RIGHT),
        ("1944", "1944", RIGHT),
    ],
)
def test_rules_compare_a_number_by_value(rule: object, reference: str, answer: str, verdict: Verdict) -> None:
    assert callable(rule)
    assert rule(answer, Question("q", "?", (reference,))).verdict is verdict


def test_references_in_words_are_compared_as_before() -> None:
    question = Question("q", "?", ("Route 1.5", "B-52"))
    assert RULES["exact"]("route 15", question).verdict is RIGHT
    assert RULES["contains"]("a b52", question).verdict is RIGHT
    assert RULES["exact"]("1990s", Question("q", "?", ("1990",))).verdict is WRONG


@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=1000))
def test_a_number_is_spelt_as_one_word_that_no_rule_changes(value: Fraction) -> None:
    written = f"{value.numerator}/{value.denominator}"
    word = spelt(written).strip()
    assert set(word) <= set(string.ascii_lowercase + string.digits)
    assert normalised(word) == word and len(rouge.words(word)) == 1
    assert spelt(f"it is {written}.").split()[2:] == [word, "."]
    assert number_of(written) == (value, False)


@pytest.mark.parametrize(
    ("texts", "same"),
    [
        (("1.5", "15"), False),
        (("-3", "3"), False),
        (("1500", "1500.00"), True),
        (("1500", "She pays $1,500."), True),
        (("2 + 3 = 5", "The answer is 5 since 2 + 3 = 5"), True),
        (("\\boxed{x + 1}", "so \\boxed{x+1}"), True),
        (("\\boxed{x + 1}", "1"), False),
        (("I don't know", "i dont know."), True),
        (("I don't know", "5"), False),
        (("", "  "), True),
    ],
)
def test_samples_of_one_result_mean_the_same(texts: tuple[str, str], same: bool) -> None:
    assert same_results(texts)(0, 1) is same and same_results(texts)(1, 0) is same


def numeric(tmp_path: Path) -> Run:
    asked = [Question(f"q{place}", "How many?", (reference,)) for place, reference in enumerate(("15", "1500", "many"))]
    samples = [("1.5", "15", "15.0"), ("1500", "1500.00", "It is 1,500"), ("3", "-3", "3.")]
    rows = [answered(place, each, "15", samples[place]) for place, each in enumerate(asked)]
    run = write_run(tmp_path / "runs" / "numeric", rows)
    run.folder.questions.write_text("".join(f"{line_of(each)}\n" for each in asked))
    return run


def sets(run: Run, **options: Any) -> tuple[object, ...]:
    options = {"measures": ("semantic-sets",), **options}
    outcome = ScoringStage(str(run.folder.root), ScoreOptions(**options), console=Console(quiet=True)).run()
    assert outcome.scores is not None and outcome.meta is not None
    assert outcome.meta.settings["equivalence"]["by"] == (options.get("equivalence") or "math")
    return outcome.scores.columns["semantic-sets"]


def test_equivalence_by_value_is_chosen_where_references_are_numbers(tmp_path: Path) -> None:
    run = numeric(tmp_path)
    assert sets(run) == (2.0, 1.0, 2.0)
    assert sets(run, equivalence="exact") == (2.0, 3.0, 1.0), "1.5 and 15.0 are apart from 15, and -3 is 3"
    words = write_run(tmp_path / "runs" / "words", [answered(0, Question("q", "?", ("Paris",)), "a", ("1.5", "15"))])
    made = ScoringStage(str(words.folder.root), ScoreOptions(), console=Console(quiet=True))
    assert made.options.equivalence == "exact"


def test_the_judge_that_is_named_next_is_that_of_numbers(tmp_path: Path) -> None:
    run = numeric(tmp_path)
    finish = {"eos": 3, "stop": 0, "length": 0}
    done = dict(run.done) | {"counts": {"answers": 3, "tokens": 3, "finish": finish}, "shards": []}
    assert any("gpuherd judge numeric math" in line for line in done_lines(run.folder, done))
    with pytest.raises(UsageError, match="judge numeric math'"):
        gpuherd(["judge", "numeric", "--audit", "--runs-dir", str(run.folder.root.parent)])


def test_most_references_decide() -> None:
    numbers, words = Question("a", "?", ("5", "five")), Question("b", "?", ("Paris",))
    assert mostly_numbers([numbers, numbers, words]) and not mostly_numbers([numbers, words]) and not mostly_numbers([])
    assert (rule_for([numbers]), rule_for([words])) == ("math", "exact")
