"""What of a generation is the answer: texts, tokens and figures alike, for judges, measures and prompts."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.qa.grading.conftest import write_run
from tests.qa.small_models import make_tokenizer

from gpuherd.cli.main import run as gpuherd
from gpuherd.errors import ExitCode, UsageError
from gpuherd.lm.backend import Finish, Generation
from gpuherd.lm.tokens import CHANNEL_TOKENS, Detokenizer, decode_tokens
from gpuherd.qa.grading.files import RULES, JudgeKind
from gpuherd.qa.grading.stage import items_of, judge_by_rule
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.measures.evidence import answer_of
from gpuherd.qa.record import Answered, Prompted, Question, answered_of, line_of
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.files import scores, scoring_named
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.scoring.score import ScoringStage
from gpuherd.qa.span import (
    SPANS,
    Span,
    has_thought,
    is_only_thought,
    knows_thoughts,
    opens_thought,
    part_of,
    split_thoughts,
    with_closed_thought,
    without_thoughts,
)
from gpuherd.qa.statistics.files import StatisticSpec
from gpuherd.qa.statistics.self_evaluation import PTruePrompts

ASKED = Question("q", "2 + 3?", ("5",))
LOG = -0.25


def generation(*pieces: str, finish: Finish = Finish.EOS, in_thought: bool = False) -> Generation:
    """A generation of these tokens, each a little less probable than the one before it."""
    ended = finish is Finish.EOS
    return Generation(
        tuple(range(len(pieces))),
        tuple(LOG * (place + 1) for place in range(len(pieces))),
        "".join(pieces),
        tuple(accumulate(map(len, pieces))),
        finish,
        9 if ended else None,
        -0.125 if ended else None,
        in_thought=in_thought,
    )


@pytest.mark.parametrize(
    ("text", "answer", "thought", "in_thought"),
    [
        ("5", "5", "", False),
        ("<think>2 + 3, hm</think>\n\n5", "5", "2 + 3, hm", False),
        ("2 + 3, hm</think>5", "5", "2 + 3, hm", False),
        ("2 + 3, hm</think>5", "5", "2 + 3, hm", True),
        ("<think>5", "", "5", False),
        ("so it is 5", "", "so it is 5", True),
        ("Well. <think>a</think> 4 <think>b</think> 5", "Well. \n4 \n5", "a\nb", False),
        ("4</think>4 again</think>5", "5", "4</think>4 again", False),
        ("<think>write <think> twice</think>5", "5", "write <think> twice", False),
        ("[THINK]a[/THINK]5", "5", "a", False),
        ("<seed:think>a</seed:think>5", "5", "a", False),
        ("◁think▷a◁/think▷5", "5", "a", False),
        ("<|begin_of_thought|>a<|end_of_thought|>5", "5", "a", False),
        ("<THINKING>a</thinking>5", "5", "a", False),
        ("<reasoning>a</reasoning>5", "5", "a", False),
        ("<|START_THINKING|>a<|END_THINKING|>5", "5", "a", False),
        ("<|channel>thought\na<channel|>5", "5", "a", False),
        ("<think></think>5", "5", "", False),
        ("<think>a</think>", "", "a", False),
    ],
)
def test_text_is_divided_at_the_tags(text: str, answer: str, thought: str, in_thought: bool) -> None:
    one = generation(*text, in_thought=in_thought)
    assert (part_of(one, "answer").text, part_of(one, "thought").text) == (answer, thought)
    assert part_of(one, "both").text == text.strip() and part_of(one, "both").tokens == tuple(range(len(text)))
    assert is_only_thought(one) is (text in ("<think>5", "so it is 5"))


MESSAGE = "<|start|>assistant<|channel|>{}<|message|>{}<|end|>"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>2 + 3<|end|>", MESSAGE.format("final", "5")
PIECES = ["<think>", "</think>", "[/THINK]", " ", "\n", "5", "", "k>", "<th", "é", "final", *CHANNEL_TOKENS]


@pytest.mark.parametrize(
    ("text", "answer", "thought", "in_thought"),
    [
        (ANALYSIS + "<|start|>assistant<|channel|>final<|message|>5<|return|>", "5", "2 + 3", False),
        (ANALYSIS + MESSAGE.format("commentary", "b") + FINAL, "5", "2 + 3\nb", False),
        (ANALYSIS + MESSAGE.format("commentary to=f <|constrain|>json", "{}"), "", "2 + 3\n{}", False),
        ("a<|end|>" + FINAL, "5", "a<|end|>", True),
        ("<|channel|>analysis<|message|>so it is 5", "", "so it is 5", False),
        ("<|channel|>analysis", "", "", False),
        ("<|channel|>final<|message|>5", "5", "", False),
        ("analysisIs it 5? Yes.assistantfinal5", "5", "Is it 5? Yes.", False),
        ('analysis"2 + 3"assistantcommentaryLet me see.assistantfinal5\n', "5", '"2 + 3"\nLet me see.', False),
        ("analysis of variance", "analysis of variance", "", False),
        ("analysis: the assistantfinal variable", "analysis: the assistantfinal variable", "", False),
        ("The assistantfinal variable", "The assistantfinal variable", "", False),
        ("analysisOfVariance()", "analysisOfVariance()", "", False),
        ("finally", "finally", "", False),
    ],
)
def test_the_answer_of_messages_in_channels_is_the_final_one(
    text: str, answer: str, thought: str, in_thought: bool
) -> None:
    one = generation(*text, in_thought=in_thought)
    assert (part_of(one, "answer").text, part_of(one, "thought").text) == (answer, thought)
    assert is_only_thought(one) is (answer == "") and part_of(one, "both").text == text.strip()
    assert without_thoughts(text, in_thought=in_thought) == (answer + "\n" * text.endswith("\n") if answer else None)


@pytest.mark.parametrize(
    ("pieces", "answer", "thought"),
    [
        (("", "analysis", "", "so ", "5", "", "", "assistant", "", "final", "", "5"), "5", "so 5"),
        (("", "analysis", "", "so ", "5"), "", "so 5"),
        (("", "final", "", "5"), "5", ""),
        (("analysis", " of ", "5"), "analysis of 5", ""),
        (("", "analysis", " of 5"), "analysis of 5", ""),
        (("", "é", "", "final"), "éfinal", ""),
    ],
)
def test_names_of_channels_are_told_by_the_tokens_without_text_around_them(
    pieces: tuple[str, ...], answer: str, thought: str
) -> None:
    one = generation(*pieces)
    assert (part_of(one, "answer").text, part_of(one, "thought").text) == (answer, thought)
    # The last token of the header has no text, as a token of half a letter has none.
    if thought:
        assert part_of(one, "answer").tokens == ((10, 11) if answer else ())


def test_a_texts_channels_and_tags_stay_where_they_are_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    ids = tokenizer("5", add_special_tokens=False)["input_ids"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "[INST]"]})
    brackets = tokenizer.convert_tokens_to_ids(["[THINK]", "[/THINK]", "[INST]"])
    assert decode_tokens(tokenizer, [0, brackets[0], *ids, brackets[1], brackets[2], *ids, 1]) == "[THINK]5[/THINK]5"

    other = make_tokenizer(tmp_path)
    other.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|start|>"]})
    assert decode_tokens(other, [*ids, *other.convert_tokens_to_ids(["<|end|>", "<|start|>"])]) == "5"
    channels = make_tokenizer(tmp_path)
    channels.add_special_tokens({"additional_special_tokens": [*CHANNEL_TOKENS, "<|return|>"]})
    text = "<|channel|>analysis<|message|>5?<|end|>" + FINAL
    growing = Detokenizer(channels)
    for each in channels(text + "<|return|>", add_special_tokens=False)["input_ids"]:
        growing.add(each)
    whole, ends = growing.divided()
    assert whole == text and ends[-1] == len(text)
    assert split_thoughts(whole).answer == ((text.rindex("5"), text.rindex("5") + 1),)


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "[/THINK]", " ", "\n", "5", "", "k>", "<th", "é", "final", *CHANNEL_TOKENS]
        ),
        max_size=9,
    ),
    st.booleans(),
)
def test_answer_and_thought_share_no_token_and_lose_none(pieces: list[str], in_thought: bool) -> None:
    one = generation(*pieces, in_thought=in_thought)
    answer, thought = part_of(one, "answer"), part_of(one, "thought")
    if not has_thought(one):
        assert answer == part_of(one, "both") and thought.tokens == () and thought.text == ""
        return
    assert sorted((*answer.tokens, *thought.tokens)) == list(range(len(pieces)))
    assert answer.has_end is not thought.has_end
    assert "".join("".join(answer.pieces).split()) == "".join(answer.text.split())
    assert is_only_thought(one) <= (answer.tokens == ())


def test_a_token_that_brings_part_of_the_answer_is_the_answers() -> None:
    one = generation("<think>", "a", "</think>5", "0", "\n")
    assert part_of(one, "answer").pieces == ("5", "0", "\n") and part_of(one, "answer").tokens == (2, 3, 4)
    # Line breaks behind the tag are the template's; half a letter without a character of its own is the answer's.
    two = generation("<think>", "a", "</think>", "\n\n", "", "é")
    assert part_of(two, "answer").tokens == (4, 5) and part_of(two, "answer").text == "é"


def test_measures_see_the_tokens_of_the_span_alone() -> None:
    one = generation("<think>", "so", "</think>", "\n", "5")
    spans: dict[Span, tuple[float, ...]] = {
        "answer": (5 * LOG, -0.125),
        "thought": (LOG, 2 * LOG, 3 * LOG, 4 * LOG),
        "both": (LOG, 2 * LOG, 3 * LOG, 4 * LOG, 5 * LOG, -0.125),
    }
    for span, log_probs in spans.items():
        found = answer_of(one, True, None, span)
        assert found is not None and found.log_probs == log_probs
    # The end of a thought that was not closed is no answer's end.
    cut = answer_of(generation("<think>", "so", "5"), True)
    assert cut is not None and (cut.log_probs, cut.text) == ((), "")


def test_a_prompt_that_ends_in_a_thought_is_seen_and_closed() -> None:
    assert opens_thought("<|assistant|>\n<think>\n") and not opens_thought("<think>a</think>\n")
    assert with_closed_thought("a\n<think>\n") == "a\n<think>\n\n</think>\n\n"
    channel = "<|start|>assistant<|channel|>analysis<|message|>"
    assert opens_thought(channel) and not opens_thought("<|start|>assistant") and knows_thoughts(channel)
    final = "<|start|>assistant<|channel|>final<|message|>"
    assert with_closed_thought("<|start|>assistant") == final
    assert with_closed_thought(channel) == f"{channel}<|end|>{final}"
    assert with_closed_thought("a<|channel>thought\n") == "a<|channel>thought\n\n<channel|>\n\n"
    assert with_closed_thought("a[THINK]") == "a[THINK]\n\n[/THINK]\n\n" and with_closed_thought("a") == "a"


def test_that_a_text_begins_in_a_thought_is_kept_and_old_lines_are_read() -> None:
    row = Answered(0, ASKED, Prompted("0" * 64, 3), generation("so", finish=Finish.LENGTH, in_thought=True))
    assert answered_of(line_of(row)) == row
    plain = Answered(0, ASKED, Prompted("0" * 64, 3), generation("5"))
    assert "in_thought" not in line_of(plain) and answered_of(line_of(plain)) == plain


@pytest.mark.parametrize("kind", RULES)
def test_a_thought_that_was_not_closed_is_never_correct(kind: JudgeKind) -> None:
    rows = [
        Answered(0, ASKED, Prompted("0" * 64, 3), generation("<think>", "so it is ", "5", finish=Finish.LENGTH)),
        Answered(1, ASKED, Prompted("0" * 64, 3), generation("so it is ", "5", finish=Finish.LENGTH, in_thought=True)),
        Answered(2, ASKED, Prompted("0" * 64, 3), generation("6 or so</think>", "5")),
    ]
    items, _ = items_of(rows, None)
    found = list(judge_by_rule(kind, items))
    assert [each.verdict for each in found] == [Verdict.NOT_ATTEMPTED, Verdict.NOT_ATTEMPTED, Verdict.CORRECT]
    assert "thought was not closed" in str(found[0].note)


def score(run: Run, **options: Any) -> ScoringStage:
    return ScoringStage(str(run.folder.root), ScoreOptions(**options), console=Console(quiet=True))


def columns(run: Run, **options: Any) -> dict[str, tuple[float | None, ...]]:
    outcome = score(run, **options).run()
    assert outcome.scores is not None
    return dict(outcome.scores.columns)


@pytest.fixture
def thinking(tmp_path: Path) -> Run:
    """A question with ten samples that all answer 5, each after another thought."""
    samples = tuple(generation("<think>", f"idea {number}", "</think>", "\n\n", "5") for number in range(10))
    greedy = generation("so 2 + 3", "</think>", "5")
    return write_run(tmp_path / "runs" / "thinking", [Answered(0, ASKED, Prompted("0" * 64, 3), greedy, samples)])


def test_samples_that_answer_alike_after_different_thoughts_mean_the_same(thinking: Run) -> None:
    names = ("semantic-sets", "discrete-semantic-entropy", "u-eigv", "lexical-similarity", "nll", "predictive-entropy")
    of_answer, of_thought, of_both = (
        columns(thinking, measures=names, equivalence="exact", span=span) for span in SPANS
    )
    assert of_answer["semantic-sets"] == (1.0,) and of_answer["discrete-semantic-entropy"] == (0.0,)
    assert list(of_answer["u-eigv"]) == pytest.approx([1.0])
    for found in (of_thought, of_both):
        assert found["semantic-sets"] == (10.0,)
        assert list(found["discrete-semantic-entropy"]) == pytest.approx([math.log(10)])
    assert (of_answer["nll"], of_thought["nll"]) == ((0.875,), (0.75,)) and of_both["nll"] == (1.625,)
    assert [of_answer["predictive-entropy"], of_both["predictive-entropy"]] == [(1.375,), (3.875,)]


def test_the_span_is_recorded_and_none_is_where_there_are_no_thoughts(thinking: Run, tmp_path: Path) -> None:
    assert columns(thinking, measures=("nll",))
    meta = scoring_named(thinking.folder, None)
    assert meta.span == "answer" and scores(thinking.folder, meta).columns["nll"] == (0.875,)
    plain = write_run(tmp_path / "runs" / "plain", [Answered(0, ASKED, Prompted("0" * 64, 3), generation("5"))])
    assert columns(plain, measures=("nll",)) == columns(plain, measures=("nll",), span="both")
    assert scoring_named(plain.folder, None).span == "both"
    with pytest.raises(UsageError, match="no answer of run plain has a thought"):
        score(plain, span="thought")


def test_the_command_takes_the_span(thinking: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", "thinking", "--runs-dir", str(thinking.folder.root.parent), "--measures", "nll"]
    assert gpuherd(words) == ExitCode.OK and "span: answer" in capsys.readouterr().out
    assert gpuherd([*words, "--span", "both"]) == ExitCode.OK and "span:" not in capsys.readouterr().out


def test_a_statistic_of_another_span_is_another_one() -> None:
    whole = StatisticSpec("similarity", "m", "1", {"with_question": True})
    answer = StatisticSpec("similarity", "m", "1", {"with_question": True, "span": "answer"})
    assert (whole.span, answer.span) == ("both", "answer") and whole.name != answer.name


def test_p_true_asks_about_the_answer(thinking: Run, trained: Path) -> None:
    from transformers import AutoTokenizer

    prompts = PTruePrompts(AutoTokenizer.from_pretrained(trained), "true", ideas=True)
    (answered,) = thinking.answers()
    assert "idea 0" not in prompts.text(answered) and "Possible answer: 5\n" in prompts.text(answered)
