"""The judge of numbers and formulas: which result an answer ends with, and whether that is the reference's."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.qa.grading.formulas import FormulaProcess, formula_of, math_judge, result_of
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.numbers import number_of
from gpuherd.qa.record import Question

RIGHT, WRONG, NOTHING = Verdict.CORRECT, Verdict.INCORRECT, Verdict.NOT_ATTEMPTED


def never(reference: str, answer: str) -> bool | None:
    raise AssertionError(f"numbers need no algebra: {reference} {answer}")


@pytest.fixture(scope="module")
def formulas() -> Iterator[FormulaProcess]:
    with FormulaProcess() as process:
        yield process


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### 18 dollars", "18"),
        ("#### 1\nno:\n#### 2\n", "2"),
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3 and \boxed{4", "4"),
        (r"\boxed{\boxed{3} and 4", "3"),
        ("\\boxed{" * 5000 + "5", "5"),
        ("The answer is 5 because 2 + 3 = 5, and 7 is more.", "5"),
        ("The answer is clear. Answer: 6. I took 10 minutes", "6"),
        ("2 + 2 = 4.", "4"),
        ("$1,234,567.50 in all", "$1,234,567.50"),
        ("16-3", "3"),
        ("it is -3", "-3"),
        ("1,2", "2"),
        ("version 1.2.3", "1.2"),
        ("The answer is 2 + 3 = 5 because 7 is more.", "5"),
        ("The answer is 5 (2 + 3 = 5, and 1 + 1 = 2).", "5"),
        ("The answer is 5. 1 + 1 = 2.", "5"),
        ("Answer: $12 x 3 = 6*6 = $36, 4 more", "$36"),
        ("Total - 5", "5"),
        ("In all:\n- 5", "5"),
        ("x = - 5", "- 5"),
        (r"so \$1{,}200", "$1{,}200"),
        (r"it is \frac12", r"\frac12"),
        ("1 1/2 cups", "1 1/2"),
        ("5cm", "5"),
        ("x5", None),
        ("three dozen", None),
        ("", None),
    ],
)
def test_the_result_of_an_answer(text: str, result: str | None) -> None:
    assert result_of(text) == result


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.00", Fraction(1234)),
        ("-$5", Fraction(-5)),
        ("$-5", Fraction(-5)),
        ("−7.", Fraction(-7)),
        (".5", Fraction(1, 2)),
        ("− 5", Fraction(-5)),
        (r"1{,}234\,567", Fraction(1234567)),
        ("1\u202f234.5", Fraction(2469, 2)),
        (r"-\frac12", Fraction(-1, 2)),
        ("1e3", Fraction(1000)),
        ("1 1/2", Fraction(3, 2)),
        (r"\dfrac{1}{3}", Fraction(1, 3)),
        ("$12$", Fraction(12)),
        ("12 apples", None),
        ("1/0", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_what_is_a_number(text: str, value: Fraction | None) -> None:
    found = number_of(text)
    assert (None if found is None else found[0]) == value


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        ("18", "#### 18.00", RIGHT),
        ("18", "It is 18 dollars.", RIGHT),
        ("18", "18 - 1 = 17", WRONG),
        ("0.5", "1/2", RIGHT),
        ("50", "50%", RIGHT),
        ("0.5", "50 %", RIGHT),
        ("50%", "0.5", RIGHT),
        ("50%", "5%", WRONG),
        ("1/3", "0.333", WRONG),
        ("Janet has 3.\n#### 3", "3", RIGHT),
        ("3", "there is no telling", WRONG),
        ("3", "I don't know", NOTHING),
        ("3", " ", NOTHING),
        ("Paris", "paris.", RIGHT),
        ("Paris", "I think so: the answer is Paris.", RIGHT),
        ("Paris", r"\boxed{Paris}", RIGHT),
        ("Paris", "the answer is not Paris", WRONG),
        ("Paris", "pairs", WRONG),  # the same letters: to a computer-algebra system the same product
    ],
)
def test_numbers_and_words_are_compared_without_algebra(reference: str, answer: str, verdict: Verdict) -> None:
    assert math_judge(answer, Question("1", "?", (reference,)), never).verdict is verdict


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", RIGHT),
        (r"x^2+2x+1", r"\boxed{(x+2)^2}", WRONG),
        (r"\sqrt{2}", r"The answer is $2^{1/2}$.", RIGHT),
        ("(1,2)", "the answer is (1, 2).", RIGHT),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", RIGHT),
        ("2", r"\boxed{\sqrt{4}}", RIGHT),
        ("x", "y", WRONG),
    ],
)
def test_formulas_are_compared_by_algebra(
    formulas: FormulaProcess, reference: str, answer: str, verdict: Verdict
) -> None:
    assert math_judge(answer, Question("1", "?", (reference,)), formulas.equal).verdict is verdict


def test_one_reference_that_fits_is_enough_and_no_formula_is_compared_then() -> None:
    question = Question("1", "?", (r"\sqrt{2}", "7"))
    assert math_judge("it must be 7", question, never).verdict is RIGHT


@pytest.mark.slow  # burns a second, and starts two computer-algebra systems
def test_a_formula_without_an_end_is_undecided_and_the_next_is_compared_again() -> None:
    with FormulaProcess(cpu_seconds=1) as process:
        assert process.equal("x+x", "2x") is True
        assert process.equal("9^{9^{9^9}}", "3^{9^9}") is None
        assert process.equal("x+x", "2x") is True


def test_what_is_undecided_is_unparsed_but_where_another_reference_fits() -> None:
    question = Question("1", "?", ("9^{9^{9^9}}", "7"))
    ruling = math_judge("3^{9^9}", question, lambda *_: None)
    assert ruling.verdict is Verdict.UNPARSED
    assert ruling.note is not None
    assert math_judge("7", question, lambda *_: None).verdict is Verdict.CORRECT


def test_a_formula_without_an_end_stops_also_when_nobody_waits_for_it() -> None:
    command = [sys.executable, "-m", "gpuherd.qa.grading.formulas", "1"]
    pairs = [["x+x", "2x"], ["9^{9^{9^9}}", "3^{9^9}"]]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.stdout == "null\ntrue\n"
    assert done.returncode == -signal.SIGXCPU


@pytest.mark.slow  # another process with a computer-algebra system
def test_limits_that_are_lower_already_are_kept_to() -> None:
    def lower() -> None:
        for what, most in ((resource.RLIMIT_CPU, 30), (resource.RLIMIT_AS, 1 << 30)):
            resource.setrlimit(what, (most, most))

    bounded = subprocess.run(
        [sys.executable, "-m", "gpuherd.qa.grading.formulas", "60"],
        input='["x+x", "2x"]\n',
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lower,
    )
    assert bounded.stdout == "null\ntrue\n", bounded.stderr


def test_no_code_of_an_answer_runs(formulas: FormulaProcess, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for text in (f"__import__('pathlib').Path('{touched}').touch()", f"\\boxed{{open('{touched}', 'w')}} 1"):
        question = Question("1", "?", (r"\frac{x}{1}",))
        assert math_judge(text, question, formulas.equal).verdict in (WRONG, Verdict.UNPARSED)
    assert not touched.exists()


def test_formulas_of_thousands_of_characters_are_not_begun(formulas: FormulaProcess) -> None:
    assert formulas.equal("x", "x+" * 5000) is None


@pytest.mark.slow
def test_numbers_are_right_where_math_verify_finds_them_right() -> None:
    """200 answers in the forms that models give, by the library as its users call it."""
    library = pytest.importorskip("math_verify")
    draw = random.Random(0)
    forms = ["The answer is {}.", r"We get $\boxed{{{}}}$.", "3 + 4 = {}", "So it is ${}$.", "\\[ x = {} \\]"]
    disagreed = []
    for _ in range(200):
        wanted = draw.choice([draw.randrange(-50, 50), draw.randrange(10**6), draw.randrange(400) / 4])
        said = wanted if draw.random() < 0.6 else wanted + draw.choice([1, -1, 0.5])
        form = draw.choice(forms)
        commas = draw.random() < 0.5 and "x =" not in form  # the library takes "x = 1,000" for a pair of numbers
        answer = form.format(f"{said:,}" if commas else said)
        gold, own = (library.parse(text, parsing_timeout=None) for text in (f"${wanted}$", answer))
        theirs = library.verify(gold, own, timeout_seconds=None)
        ours = math_judge(answer, Question("1", "?", (str(wanted),)), never).verdict is RIGHT
        if ours != theirs:
            disagreed.append((wanted, answer, theirs))
    assert not disagreed


@given(st.text(max_size=60))
def test_any_text_has_a_result_or_none(text: str) -> None:
    result = result_of(text)
    assert result is None or result in text
    assert formula_of(text) in text
    number_of(text)


@settings(max_examples=40)
@given(st.integers(-(10**9), 10**9), st.booleans())
def test_numbers_are_found_however_they_are_written(number: int, commas: bool) -> None:
    written = f"{number:,}" if commas else str(number)
    assert math_judge(f"We have 3 and so it is {written}.", Question("1", "?", (str(number),)), never).verdict is RIGHT
