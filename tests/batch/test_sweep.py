"""Sweeps in jobs.yaml: what is drawn stays drawn, lies where it may, and mistakes are told with their lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.batch.assemble import BadJobFile, assemble
from gpuherd.batch.jobs_yaml import read_document
from gpuherd.batch.sweep import BadParameter, Sweep, described, one_of, random_bits
from gpuherd.jobs.job import Job

BITS = st.integers(0, 2**64 - 1)


def jobs(text: str) -> tuple[Job, ...]:
    return assemble(read_document(text)).jobs


def sweep_of(text: str, *, command: str = "[train, '{lr}']") -> tuple[Job, ...]:
    return jobs(f"jobs:\n- name: t\n  command: {command}\n  sweep: {text}\n")


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(BadJobFile) as told:
        jobs(text)
    return [(problem.line, problem.text) for problem in told.value.problems]


def problem_of(text: str) -> str:
    [(_, told)] = problems(f"jobs:\n- name: t\n  command: [train]\n  sweep: {text}\n")
    return told


def test_a_grid_is_every_combination_in_order() -> None:
    found = sweep_of(
        "{method: grid, parameters: {lr: [0.10, 1e-3], n: {low: 1, high: 3}, d: {low: 0, high: 0.2, step: 0.1}}}",
        command="[train, '{lr}', '{n}', '{d}']",
    )
    assert len(found) == 18
    assert [job.argv[1:] for job in found[:4]] == [
        ("0.10", "1", "0.0"),
        ("0.10", "1", "0.1"),
        ("0.10", "1", "0.2"),
        ("0.10", "2", "0.0"),
    ]
    assert found[0].name == "t-lr0.10-n1-d0.0"


def test_without_a_method_samples_mean_random() -> None:
    lists = "parameters: {lr: [1, 2, 3, 4]}"
    assert [job.name for job in sweep_of(f"{{{lists}}}")] == ["t-lr1", "t-lr2", "t-lr3", "t-lr4"]
    assert len(sweep_of(f"{{samples: 2, {lists}}}")) == 2


RANDOM = """\
jobs:
  - name: t
    command: train --lr {{lr}} --layers {{layers}} --opt {{opt}}
    sweep:
      samples: {samples}
      seed: {seed}
      parameters: {{lr: {{low: 1e-5, high: 1e-1, log: true}}, layers: {{low: 1, high: 8}}, opt: [adam, sgd]{more}}}
"""


def test_the_same_file_draws_the_same_and_more_samples_keep_the_earlier() -> None:
    first = jobs(RANDOM.format(samples=5, seed=0, more=""))
    assert jobs(RANDOM.format(samples=5, seed=0, more="")) == first
    assert jobs(RANDOM.format(samples=30, seed=0, more=""))[:5] == first
    assert not {job.name for job in jobs(RANDOM.format(samples=30, seed=1, more=""))} & {job.name for job in first}


def test_draws_do_not_depend_on_other_entries_or_parameters() -> None:
    text = RANDOM.format(samples=5, seed=0, more="")
    first = jobs(text)
    above = text.replace(
        "jobs:\n", "jobs:\n  - {name: other, command: x, sweep: {samples: 3, parameters: {a: [1, 2, 3]}}}\n"
    )
    assert jobs(above)[3:] == first
    wider = jobs(RANDOM.format(samples=5, seed=0, more=", drop: {low: 0.0, high: 0.5}"))
    assert [job.argv for job in wider] == [job.argv for job in first]
    assert [job.name.rpartition("-drop")[0] for job in wider] == [job.name for job in first]


def test_these_draws_never_change() -> None:
    # What users have run by now is found again by these words: another value is another job.
    assert [job.name for job in jobs(RANDOM.format(samples=3, seed=0, more=""))] == NAMES


NAMES = ["t-lr0.0169996-layers6-optadam", "t-lr0.000256797-layers8-optadam", "t-lr2.0436e-05-layers6-optsgd"]


def test_a_matrix_gets_every_draw_and_rounds_too() -> None:
    found = jobs(
        "jobs: [{name: t, command: 'train {m} {lr} {round}', matrix: {m: [a, b]}, exclude: [{m: c}], rounds: 2,"
        " sweep: {samples: 3, parameters: {lr: {low: 0.0, high: 1.0}}}}]"
    )
    assert len(found) == 12
    drawn = [job.argv[2] for job in found]
    assert drawn[:3] == drawn[3:6] == drawn[6:9]
    assert len(set(drawn)) == 3
    assert found[0].name == f"t-ma-lr{drawn[0]}-round1"


def test_settings_differ_also_where_there_are_few() -> None:
    found = sweep_of("{samples: 8, parameters: {lr: {low: 1, high: 8}}}")
    assert sorted(int(job.argv[1]) for job in found) == list(range(1, 9))


def test_a_need_means_every_draw() -> None:
    text = RANDOM.format(samples=4, seed=0, more="") + "  - {name: e, command: evaluate, needs: t}\n"
    *trained, evaluated = jobs(text)
    assert evaluated.needs == tuple(job.name for job in trained)


def test_all_mistakes_are_told_with_their_lines() -> None:
    text = """\
jobs:
  - command: train {lr}
    sweep:
      methud: random
      samples: none
      seed: x
      parameters:
        lr: {low: 1e-5, high: 1e-1, log: maybe}
        a: {min: 1, high: 2}
        b: {low: 2,
            high: 1}
        c: {low: 0, high: 1, log: true}
        d: {low: 1, high: 8, step: 2, log: true}
        e: {low: 1, high: 8, step: 0}
        f: {mean: 0, std: -1}
        g: {mean: 0}
        h: {low: 1}
        i: []
        j: [1, 1]
        k: {values: [1, 2]}
        l: {low: one, high: 2}
        m: {low: 1e999, high: 2}
        n-o: [1]
        round: [1]
        p: {low: 1e-99999999999, high: 2}
        q: {mean: 0, std: 1, step: 1}
        r: {low: [1], high: 2}
  - command: train
    sweep: [lr]
  - command: train
    sweep: {samples: 1}
  - command: train
    sweep: {parameters: {}}
"""
    told = problems(text)
    assert [line for line, _ in told] == [4, 5, 6, 8, 9, *range(11, 28), 29, 31, 33]
    by_line = dict(told)
    assert by_line[4] == "sweep: unknown key 'methud'; did you mean method?"
    assert by_line[9] == "a: unknown key 'min'; did you mean low?"
    assert by_line[11] == "b: high=1 is below low=2"
    assert by_line[17] == "h says nothing of high; write {low: 1, high: 8}, or a list"
    assert by_line[20] == "k: write the values as a list: [a, b, c]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{method: bayes, parameters: {a: [1]}}", "method: 'bayes'; possible: grid, random"),
        ("{method: random, parameters: {a: [1]}}", "method: random needs samples: how many settings are drawn"),
        ("{method: grid, seed: 1, parameters: {a: [1]}}", "seed is for method: random; a grid has all combinations"),
        ("{seed: 1, parameters: {a: [1]}}", "seed is for method: random; a grid has all combinations"),
        (
            "{method: grid, parameters: {a: {low: 0.0, high: 1}}}",
            "a can't be counted off: a grid needs a list or a step (or say samples)",
        ),
        (
            "{samples: 5, parameters: {a: [1, 2], b: [1, 2]}}",
            "samples: 5, and there are only 4 different settings; method: grid takes all of them",
        ),
        (
            "{parameters: {a: {low: 1, high: 1000000000000}}}",
            "the sweep stands for 1000000000000 jobs; the most of a file are 1000000",
        ),
        (
            "{samples: 2000000, parameters: {a: {low: 0.0, high: 1}}}",
            "the sweep stands for 2000000 jobs; the most of a file are 1000000",
        ),
        (
            "{samples: 9, parameters: {a: {low: 1, high: 3, log: true}}}",
            "sweep: only 3 different settings were found in 10001 draws; ask for fewer samples",
        ),
    ],
)
def test_a_sweep_that_can_not_be(text: str, told: str) -> None:
    assert problem_of(text) == told


def test_a_key_of_matrix_and_sweep_is_refused() -> None:
    text = "jobs:\n- command: [t]\n  matrix: {a: [1]}\n  sweep: {parameters: {a: [2]}}\n"
    assert problems(text) == [(4, "'a' is in the sweep and in the matrix; leave one of them out")]


def test_a_value_is_one_word_whatever_is_in_it() -> None:
    (job,) = sweep_of('{parameters: {lr: ["a b; $(touch owned) \'"]}}')
    assert job.argv == ("train", "a b; $(touch owned) '")


def bounds(said: Mapping[str, str]) -> tuple[float, float]:
    return float(said["low"]), float(said["high"])


NUMBERS = st.floats(-1e300, 1e300).map(lambda number: repr(number + 0.0)) | st.integers(-(10**14), 10**14).map(str)
POSITIVE = st.floats(1e-300, 1e300).map(repr) | st.integers(1, 10**14).map(str)


@given(st.tuples(NUMBERS, NUMBERS), BITS, st.none() | POSITIVE)
def test_draws_lie_between_the_bounds(ends: tuple[str, str], bits: int, step: str | None) -> None:
    low, high = sorted(ends, key=float)
    said = {"low": low, "high": high} | ({} if step is None else {"step": step})
    drawn = described(said).draw(bits)
    assert float(low) <= float(drawn) <= float(high)
    if step is None and all("." not in end and "e" not in end for end in ends):
        assert drawn == str(int(drawn))


@given(st.tuples(POSITIVE, POSITIVE), BITS)
def test_draws_on_a_logarithmic_scale_lie_between_the_bounds(ends: tuple[str, str], bits: int) -> None:
    low, high = sorted(ends, key=float)
    drawn = described({"low": low, "high": high, "log": "true"}).draw(bits)
    assert float(low) <= float(drawn) <= float(high)


@given(st.integers(-50, 50), st.integers(0, 60), st.integers(1, 7), BITS)
def test_a_draw_in_steps_is_one_of_the_grid(low: int, span: int, step: int, bits: int) -> None:
    for scale in ("", "e-2"):
        found = described({"low": f"{low}{scale}", "high": f"{low + span}{scale}", "step": f"{step}{scale}"})
        values = list(found.values())
        assert len(values) == found.size() == span // step + 1
        assert found.draw(bits) in values


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True), st.integers(0, 3), st.integers(1, 9))
def test_fewer_samples_are_the_first_of_more(names: list[str], seed: int, samples: int) -> None:
    parameters = {name: described({"low": "0.0", "high": "1.0"}) for name in names}
    many = list(Sweep(parameters=parameters, samples=12, seed=seed).settings())
    assert list(Sweep(parameters=parameters, samples=samples, seed=seed).settings()) == many[:samples]
    one = {names[0]: parameters[names[0]]}
    alone = [each[names[0]] for each in Sweep(parameters=one, samples=12, seed=seed).settings()]
    assert alone == [each[names[0]] for each in many]


@given(
    st.text(max_size=12) | st.from_regex(r"[0-9.eE+-]{1,12}", fullmatch=True), st.sampled_from(["low", "high", "step"])
)
def test_any_word_is_a_number_or_is_refused(word: str, key: str) -> None:
    try:
        found = described({"low": "1", "high": "8", "step": "1", key: word})
    except BadParameter:
        return
    assert math.isfinite(float(found.draw(2**63)))


def test_draws_are_as_likely_as_they_say() -> None:
    bits = [random_bits(0, "x", number) for number in range(4000)]
    whole = Counter(described({"low": "1", "high": "4"}).draw(each) for each in bits)
    assert set(whole) == {"1", "2", "3", "4"}
    assert all(abs(count - 1000) < 150 for count in whole.values())
    assert abs(Counter(one_of(["a", "b"]).draw(each) for each in bits)["a"] - 2000) < 200
    wide = described({"low": "1e-4", "high": "1", "log": "true"})
    assert abs(sum(float(wide.draw(each)) < 1e-2 for each in bits) - 2000) < 200
    small = Counter(described({"low": "1", "high": "1000", "log": "true"}).draw(each) for each in bits)
    assert 400 < small["1"] < 750  # log(1.5 / 0.5) of log(1000.5 / 0.5): 14 of 100
    normal = [float(described({"mean": "5", "std": "2"}).draw(each)) for each in bits]
    assert abs(sum(normal) / len(normal) - 5) < 0.2
    assert abs(sum(3 < each < 7 for each in normal) / len(normal) - 0.683) < 0.04


def test_narrow_ranges_keep_digits_that_tell_values_apart() -> None:
    narrow = described({"low": "1000.0", "high": "1000.001"})
    assert len({narrow.draw(random_bits(0, "x", number)) for number in range(1000)}) > 990
