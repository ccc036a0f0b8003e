"""Results of sums and formulas as rewards."""

from __future__ import annotations

from gpuherd.posttrain.rewards.answers import MathRewards
from gpuherd.posttrain.types import Problem

NUMBER = Problem("n", "?", ("The sum is 4.\n#### 1,200",))
HIDDEN = Problem("h", "?", ("a long way",), {"value": "\\frac{1}{2}"})
FORMULA = Problem("f", "?", ("x^2+1",))


def test_numbers_and_formulas_that_are_written_alike_start_no_process() -> None:
    rewards = MathRewards()
    said = ["1200", "\\boxed{1200.0}", "12", "", "I don't know", "$x^2 + 1$"]
    found = rewards.rewards([NUMBER] * 5 + [FORMULA], said)
    assert [each.value for each in found] == [1, 1, 0, 0, 0, 1]
    assert found[3].note == found[4].note == "nothing is answered"
    assert all(each._process is None for each in rewards._all)


def test_formulas_are_compared_once_in_a_batch_and_remembered() -> None:
    rewards = MathRewards(processes=1)
    problems = [FORMULA] * 4 + [HIDDEN] * 2
    said = ["\\boxed{1+x^2}", "\\boxed{1+x^2}", "\\boxed{1+x^3}", "0", "0.5", "50%"]
    first = rewards.rewards(problems, said)
    assert [each.value for each in first] == [1, 1, 0, 0, 1, 1]
    assert len(rewards._known) == 3
    rewards.close()
    assert rewards.rewards(problems, said) == first
    assert all(each._process is None for each in rewards._all)  # all was remembered


def test_numbers_without_an_end_cost_no_time() -> None:
    rewards = MathRewards(processes=1)
    towers = [
        "10^{10^{10}}",
        "9^{9^{9^9}}",
        r"\left(10^5\right)^{10^{5}}",
        "3000000!",
        "(1000!)!",
        "2^{20!}",
        "2^{-10^9}",
        "7^{" + "9" * 900 + "}",
    ]
    found = rewards.rewards([FORMULA] * len(towers), [f"\\boxed{{{each}}}" for each in towers])
    assert [each.value for each in found] == [0.0] * len(towers)
    assert all(each._process is None for each in rewards._all), "no algebra system was bothered"
    # As it is written it is right, and powers that can be worked with are.
    same = Problem("t", "?", ("10^{10^{10}}",))
    assert rewards.rewards([same], ["\\boxed{10^{10^{10}}}"])[0].correct
    assert rewards.rewards([Problem("p", "?", ("16",))], ["\\boxed{2^{2^{2}}}"])[0].correct
    rewards.close()


def test_what_can_not_be_compared_earns_nothing_and_says_so() -> None:
    rewards = MathRewards()
    found = rewards.rewards([FORMULA], ["\\boxed{" + "x+" * 2000 + "1}"])[0]
    assert (found.value, found.correct) == (0.0, False)
    assert found.note is not None
    assert "could not be compared" in found.note
    rewards.close()
