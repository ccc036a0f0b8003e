"""Option dataclasses become flags in every documented spelling, and come back as the same dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import ExitCode
from gpuherd.jobs.options import GpuOptions
from gpuherd.options import (
    Option,
    Parser,
    WrongType,
    add_options,
    build,
    by_spelling,
    did_you_mean,
    option,
    parse_value,
)
from gpuherd.options import parse as parse_word
from gpuherd.units import count


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str | None = option(None, help="a word")
    threshold: int = option(500, help="100 % of it", flag="mem-threshold", aliases=("old-threshold",), parse=count)
    ids: tuple[str, ...] = option((), help="several", many=True)
    method: str = option("mid", help="one of two", choices=("mid", "peak"))
    loud: bool = option(False, help="a flag")
    rank: int | None = option(None, help="a number, or the flag alone", parse=count, alone="16")


def parse(*words: str) -> Sample:
    parser = Parser(prog="test")
    add_options(parser, Sample)
    args, unknown = parser.parse_known_args(words)
    parser.reject_unknown(unknown)
    return build(Sample, args)


def test_nothing_given_means_the_defaults() -> None:
    assert parse() == Sample()


@pytest.mark.parametrize(
    "flag", ["--mem-threshold", "--mem_threshold", "--threshold", "--old-threshold", "--old_threshold"]
)
def test_every_spelling_sets_the_same_field(flag: str) -> None:
    assert parse(flag, "7").threshold == 7


def test_many_words_become_a_tuple_and_a_flag_becomes_true() -> None:
    assert parse("--ids", "0", "2", "--loud") == Sample(ids=("0", "2"), loud=True)


def test_a_flag_may_stand_alone() -> None:
    assert [parse(*words).rank for words in ([], ["--rank"], ["--rank", "8"], ["--rank", "--loud"])] == [
        None,
        16,
        8,
        16,
    ]


def test_help_shows_only_the_main_spelling_and_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert "--mem-threshold" in shown
    assert "100 % of it (default: 500)" in shown
    assert "--old" not in shown
    assert "mem_threshold" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mem-treshold", "3"], "did you mean --mem-threshold?"),
        (["--mem-threshold", "-3"], "'-3' is not a whole number of 0 or more"),
        (["--mem-threshold", "many"], "'many' is not a whole number of 0 or more"),
        (["--method", "best"], "invalid choice: 'best'"),
        (["stray"], "unknown argument 'stray'"),
    ],
)
def test_bad_words_end_with_the_usage_code_and_say_why(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == ExitCode.USAGE
    assert message in capsys.readouterr().err


@given(st.integers(1, 99), st.integers(0, 10**6), st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True))
def test_gpu_options_survive_the_way_through_the_command_line(gpus: int, threshold: int, ids: list[int]) -> None:
    parser = Parser(prog="test")
    add_options(parser, GpuOptions)
    words = ["--max-gpus", str(gpus), "--gpu_memory_threshold", str(threshold), "--gpus", *map(str, ids)]
    options = build(GpuOptions, parser.parse_args(words))
    assert (options.max_gpus, options.gpu_memory_threshold) == (gpus, threshold)
    assert options.gpu_ids == tuple(map(str, ids))
    assert GpuOptions(gpu_list=(",".join(map(str, ids)),)).gpu_ids == options.gpu_ids


def test_one_parser_reads_words_and_typed_values() -> None:
    spec = {name: found for name, (_, found) in by_spelling(Sample).items()}
    assert spec["mem_threshold"] is spec["threshold"] is spec["old_threshold"]
    assert parse_word(spec["ids"], "a") == ("a",) == parse_value(spec["ids"], "a")
    assert parse_value(spec["ids"], ["a", 2]) == ("a", "2")
    assert [parse_word(spec["loud"], word) for word in ("yes", "ON", "1", "False", "off")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert (parse_value(spec["loud"], False), parse_value(spec["loud"], "true")) == (False, True)
    for value, name in ((1, "loud"), ("yes", "loud"), (True, "rank"), ([3], "rank"), ({}, "ids")):
        with pytest.raises(WrongType):
            parse_value(spec[name], value)
    for value, name in (("-1", "rank"), ("pek", "method")):
        with pytest.raises(ValueError, match=r"peak|whole number"):
            parse_value(spec[name], value)
    with pytest.raises(ValueError, match="'perhaps' is neither on nor off; write yes or no"):
        parse_word(spec["loud"], "perhaps")


def test_an_option_may_have_another_name_than_its_field() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Named:
        memory_mb: int | None = option(None, help="memory", name="mem", key="m", parse=count)

    assert by_spelling(Named).keys() == {"mem", "m"}
    parser = Parser(prog="test")
    add_options(parser, Named)
    assert build(Named, parser.parse_args(["--mem", "3"])).memory_mb == 3
    assert parser.parse_known_args(["--memory-mb=3"])[1] == ["--memory-mb=3"]


def test_the_nearest_names_or_a_hint_in_their_place() -> None:
    assert did_you_mean("oder", ["order", "older"], most=2, show=repr) == "; did you mean 'order' or 'older'?"
    assert (did_you_mean("x", ["order"], "write y"), did_you_mean("x", ["order"])) == ("; write y", "")
    assert Option(help="").is_switch is False
