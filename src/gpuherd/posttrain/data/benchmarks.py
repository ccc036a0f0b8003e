"""Benchmarks of the Hub: questions with results (GSM8K, MATH, AIME), texts that are gone on with and scored by a model
(TL;DR, IMDB), and programs that are scored by tests (MBPP, HumanEval, and files of one's own).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import at_least, read
from gpuherd.posttrain.data.dataset import Checked, DataTask, ParsedRow, Part, Reading, Source, by_model
from gpuherd.posttrain.data.options import TaskOptions, task
from gpuherd.posttrain.rewards.answers import VALUE, MathRewards
from gpuherd.posttrain.rewards.code import ENTRY, PREFIX, SETUP, TESTS, CodeRewards, CodeScoring, read_tests
from gpuherd.posttrain.rewards.sandbox import Limits
from gpuherd.posttrain.types import Problem
from gpuherd.qa.data.questions import BadRow, Unusable
from gpuherd.qa.data.readers.benchmarks import gsm8k_drafts
from gpuherd.qa.grading.formulas import formula_of

# ---- questions whose results are compared ----------------------------------------------------------------------------

PromptStyle = Literal["boxed", "hashes", "plain"]
# PITA's prompt (of its public code), and one whose answers end as gsm8k's own do.
PROMPTS: Mapping[PromptStyle, str] = {
    "boxed": "Problem:\n\n{question} Write your answer inside \\boxed{}.\n\nSolution:",
    "hashes": "Question: {question}\nWrite the final answer behind ####.\nAnswer:",
    "plain": "{question}",
}


def prompt_of(question: str, style: PromptStyle) -> str:
    """A question in a style of prompt."""
    return PROMPTS[style].replace("{question}", question.strip())


@dataclass(frozen=True, slots=True)
class Questions(Reading):
    """``prompt``: boxed, hashes (answers end as GSM8K's do) or plain; the others as of ``dataset.Reading``."""

    prompt: PromptStyle = "boxed"


def _questions(
    name: str,
    source: Source,
    parse: Callable[[Mapping[str, Any]], ParsedRow],
    problem: Callable[[PromptStyle, Checked], Problem],
    aliases: Sequence[str] = (),
) -> None:
    """Registers a data set of questions whose results are compared."""

    @task(name, Questions, aliases=aliases)
    def make(settings: Questions, options: TaskOptions) -> DataTask:
        scoring = MathRewards(options.processes)
        of_style = partial(problem, settings.prompt)
        return DataTask(name, settings.of(source), parse, of_style, scoring, settings.revision)


def parse_gsm8k(row: Mapping[str, Any]) -> ParsedRow:
    """The question with its number and its solution. Raises BadRow."""
    found = next(gsm8k_drafts(row))
    if isinstance(found, Unusable):
        raise BadRow(found.reason)
    return ParsedRow(found.question, found.answers, found.id, found.worked)


def _gsm8k_problem(style: PromptStyle, found: Checked) -> Problem:
    """The solution that is imitated ends as the prompt asks for."""
    number = found.answers[0]
    worked = found.worked or number
    if style == "boxed":
        worked = f"{worked.rpartition('####')[0].rstrip()}\nThe answer is \\boxed{{{number}}}."
    return Problem(found.id, prompt_of(found.question, style), (f" {worked}",), {VALUE: number})


def parse_math(row: Mapping[str, Any]) -> ParsedRow:
    """The problem with its result: the column ``answer``, else what is boxed in the solution. Raises BadRow."""
    solution, answer = row.get("solution"), row.get("answer")
    if answer is None:
        if not isinstance(solution, str) or "boxed" not in solution:
            raise BadRow("no answer, and nothing boxed in the solution")
        answer = formula_of(solution)
    return ParsedRow(row["problem"], answer, row.get("unique_id"), solution)


def parse_aime(row: Mapping[str, Any]) -> ParsedRow:
    """The problem with its number; the id is made of the text, since these sets number their rows differently."""
    return ParsedRow(row["problem"], row["answer"], worked=row.get("solution"))


def _math_problem(style: PromptStyle, found: Checked) -> Problem:
    """The solution is what is imitated."""
    result = found.answers[0].strip()
    worked = found.worked or f"The answer is \\boxed{{{result}}}."
    return Problem(found.id, prompt_of(found.question, style), (f" {worked}",), {VALUE: result})


# GSM8K (Cobbe et al. 2021, arXiv 2110.14168): sums in words, of several steps, judged by their last number.
_questions(
    "gsm8k",
    Source(
        Part("openai/gsm8k", "train", "main"),
        Part("openai/gsm8k", "test", "main"),
        frozenset({"question", "answer", "id"}),
    ),
    parse_gsm8k,
    _gsm8k_problem,
)
# MATH (Hendrycks et al. 2021, arXiv 2103.03874): competition problems whose results are formulas. The test is MATH-500
# (Lightman et al. 2023), 500 of the 5,000 test problems; trained is on the 7,500 training problems, so that nothing of
# the test is trained on.
_questions(
    "math",
    Source(
        Part("DigitalLearningGmbH/MATH-lighteval", "train"),
        Part("HuggingFaceH4/MATH-500", "test"),
        frozenset({"problem", "solution", "answer", "unique_id"}),
    ),
    parse_math,
    _math_problem,
    ("math_500", "math500"),
)
# AIME: problems of the American Invitational Mathematics Examination, whose results are whole numbers from 0 to 999.
# Those of 2022 to 2024 (90) are for training and have no test of their own; aime2024 and aime2025 (30 each) are tests
# only. 2024's are among the first: who trains on aime22to24 tests on aime2025, and ``aime`` is both of these together.
_TRAIN, _TEST = Part("AI-MO/aimo-validation-aime", "train"), Part("math-ai/aime25", "test")
for _name, _train, _test in (
    ("aime", _TRAIN, _TEST),
    ("aime22to24", _TRAIN, None),
    ("aime2024", None, Part("HuggingFaceH4/aime_2024", "train")),
    ("aime2025", None, _TEST),
):
    _questions(_name, Source(_train, _test, frozenset({"problem", "solution", "answer"})), parse_aime, _math_problem)


# ---- texts that a model scores ---------------------------------------------------------------------------------------


@task("tldr", Reading)
def make_tldr(settings: Reading, options: TaskOptions) -> DataTask:
    """TL;DR: posts to be summed up (Völske et al. 2017; filtered by Stiennon et al. 2020, arXiv 2009.01325), scored by
    a reward model of people's preferences. Files have ``prompt`` (the post, up to its ``TL;DR:``) and ``completion``.
    """
    name = "trl-lib/tldr"
    source = Source(Part(name, "train"), Part(name, "test"), frozenset({"prompt", "completion"}))

    def problem(found: Checked) -> Problem:
        # The summary that somebody wrote is imitated, behind a space.
        return Problem(found.id, found.question.rstrip(), tuple(f" {each.strip()}" for each in found.answers))

    scoring = by_model(options, "OpenAssistant/reward-model-deberta-v3-large-v2")
    return DataTask("tldr", settings.of(source), parse_tldr, problem, scoring, settings.revision)


def parse_tldr(row: Mapping[str, Any]) -> ParsedRow:
    """The post with its summary."""
    return ParsedRow(row["prompt"], row["completion"])


@dataclass(frozen=True, slots=True)
class Reviews(Reading):
    """Which beginnings of reviews.

    Attributes:
        words: of a review, divided at white space, that are given.
        label: of the classifier, whose logit is the reward; null where it has one output.
    """

    words: int = 60
    label: str | None = "POSITIVE"

    def __post_init__(self) -> None:
        at_least(self, words=1)


@task("imdb", Reviews, aliases=("imdbgen",))
def make_imdb(settings: Reviews, options: TaskOptions) -> DataTask:
    """IMDB: the beginnings of film reviews (Maas et al. 2011) to be gone on with, scored by how positive a classifier
    finds the whole: the logit of its label POSITIVE. Files have ``text``."""
    source = Source(Part("stanfordnlp/imdb", "train"), Part("stanfordnlp/imdb", "test"), frozenset({"text"}))

    def problem(found: Checked) -> Problem:
        return Problem(found.id, found.question, tuple(f" {each}" for each in found.answers))

    scoring = by_model(options, "lvwerra/distilbert-imdb", settings.label)
    return DataTask("imdb", settings.of(source), beginnings(settings.words), problem, scoring, settings.revision)


def beginnings(words: int) -> Callable[[Mapping[str, Any]], ParsedRow]:
    """Returns what parses a review: its first words, and the others as the answer; line breaks become spaces."""

    def parse(row: Mapping[str, Any]) -> ParsedRow:
        said = row["text"].replace("<br />", " ").split()
        if len(said) <= words:
            raise BadRow(f"not longer than {words} words")
        return ParsedRow(" ".join(said[:words]), " ".join(said[words:]))

    return parse


# ---- programs that tests score ---------------------------------------------------------------------------------------
#
# A row of a file has ``prompt`` (or ``question``, ``text``), ``tests`` (``rewards.code.read_tests`` says their forms),
# and perhaps ``setup`` (source that is run before), ``solution`` and ``id``. MBPP's and HumanEval's rows are understood
# as they are.


@dataclass(frozen=True, slots=True)
class Programs(Reading):
    """Which problems, and what they earn.

    Attributes:
        partial, all_bonus, error_penalty: as of ``rewards.code.CodeScoring``.
        timeout: seconds for the program with all its tests; for each input by itself.
        memory_mb: of the program.
    """

    partial: bool = True
    all_bonus: float = 0.0
    error_penalty: float = 0.0
    timeout: float = 5.0
    memory_mb: int = 512


_PROGRAM_COLUMNS = frozenset(
    {"id", "prompt", "question", "text", "tests", "setup", "solution", "code", "task_id", "test_list"}
    | {"test_setup_code", "test", "entry_point", "canonical_solution"}
)


@task("code", Programs)
def make_code(settings: Programs, options: TaskOptions) -> DataTask:
    """The task of a file: its last tenth is the test where there is no ``test_data``. Raises UsageError."""
    if settings.data is None and settings.test_data is None:
        raise UsageError("code: data=FILE says where its problems are; mbpp and humaneval are tasks of the Hub")
    return _code_task("code", Source(None, None, _PROGRAM_COLUMNS, divided=True), settings, options)


@task("mbpp", Programs)
def make_mbpp(settings: Programs, options: TaskOptions) -> DataTask:
    """MBPP (Austin et al. 2021, arXiv 2108.07732)."""
    name = "google-research-datasets/mbpp"
    source = Source(Part(name, "train", "full"), Part(name, "test", "full"), _PROGRAM_COLUMNS)
    return _code_task("mbpp", source, settings, options)


@task("humaneval", Programs)
def make_humaneval(settings: Programs, options: TaskOptions) -> DataTask:
    """HumanEval (Chen et al. 2021, arXiv 2107.03374), which is a test only."""
    source = Source(None, Part("openai/openai_humaneval", "test"), _PROGRAM_COLUMNS)
    return _code_task("humaneval", source, settings, options)


def programs_of(name: str, path: str, options: TaskOptions) -> DataTask:
    """The task of a file that is known to hold programs. Raises UsageError."""
    settings = replace(read(Programs, options.settings, name), data=path)
    return _code_task(name, Source(None, None, _PROGRAM_COLUMNS, divided=True), settings, options)


def parse_program(row: Mapping[str, Any]) -> ParsedRow:
    """The problem of a row, its tests hidden. Raises ValueError, KeyError."""
    name, hidden = row.get("id", row.get("task_id")), {}
    solution = next((row[each] for each in ("solution", "code", "canonical_solution") if row.get(each)), None)
    question = next((row[each] for each in ("prompt", "question", "text") if row.get(each) is not None), None)
    if question is None:
        raise BadRow("no column prompt, question or text")
    if isinstance(row.get("entry_point"), str) and isinstance(row.get("test"), str):
        tests: Any = [f"{row['test']}\n\ncheck({row['entry_point']})\n"]
        hidden = {ENTRY: row["entry_point"], PREFIX: question}
    elif row.get("test_list") is not None:
        tests = row["test_list"]
        shown = "\n".join(map(str, tests))
        question = f"{question}\nYour code should pass these tests:\n{shown}\n"
        hidden = {SETUP: row.get("test_setup_code") or ""}
    else:
        tests = row["tests"]
        hidden = {SETUP: row.get("setup") or ""}
    read_tests(tests)
    parts = {key: value for key, value in hidden.items() if value}
    return ParsedRow(question, () if solution is None else solution, name, hidden={TESTS: json.dumps(tests), **parts})


def program_problem(found: Checked) -> Problem:
    """The problem of a checked row, its texts as they are: white space matters in programs."""
    return Problem(found.id, found.question, found.answers, found.hidden)


def _code_task(name: str, source: Source, settings: Programs, options: TaskOptions) -> DataTask:
    scoring = CodeRewards(
        CodeScoring(settings.partial, settings.all_bonus, settings.error_penalty),
        Limits(seconds=settings.timeout, memory=settings.memory_mb << 20),
        processes=options.processes,
        allow_unconfined=options.allow_unconfined,
    )
    return DataTask(name, settings.of(source), parse_program, program_problem, scoring, settings.revision)
