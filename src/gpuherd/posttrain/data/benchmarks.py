"""Benchmarks of the Hub: questions with results (GSM8K, MATH, AIME), and texts that are gone on with and scored by a
model (TL;DR, IMDB)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.dataset import Checked, DataTask, ParsedRow, Part, Reading, Source
from gpuherd.posttrain.data.options import TaskOptions, task
from gpuherd.posttrain.rewards.answers import VALUE, MathRewards
from gpuherd.posttrain.rewards.reward_model import ModelRewards
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

TLDR_MODEL = "OpenAssistant/reward-model-deberta-v3-large-v2"
IMDB_MODEL = "lvwerra/distilbert-imdb"


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

    scoring = _by_model(options, TLDR_MODEL, None)
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
        if self.words < 1:
            raise UsageError(f"words={self.words}; the least is 1")


@task("imdb", Reviews, aliases=("imdbgen",))
def make_imdb(settings: Reviews, options: TaskOptions) -> DataTask:
    """IMDB: the beginnings of film reviews (Maas et al. 2011) to be gone on with, scored by how positive a classifier
    finds the whole: the logit of its label POSITIVE. Files have ``text``."""
    source = Source(Part("stanfordnlp/imdb", "train"), Part("stanfordnlp/imdb", "test"), frozenset({"text"}))

    def problem(found: Checked) -> Problem:
        return Problem(found.id, found.question, tuple(f" {each}" for each in found.answers))

    scoring = _by_model(options, IMDB_MODEL, settings.label)
    return DataTask("imdb", settings.of(source), beginnings(settings.words), problem, scoring, settings.revision)


def beginnings(words: int) -> Callable[[Mapping[str, Any]], ParsedRow]:
    """Returns what parses a review: its first words, and the others as the answer; line breaks become spaces."""

    def parse(row: Mapping[str, Any]) -> ParsedRow:
        said = row["text"].replace("<br />", " ").split()
        if len(said) <= words:
            raise BadRow(f"not longer than {words} words")
        return ParsedRow(" ".join(said[:words]), " ".join(said[words:]))

    return parse


def _by_model(options: TaskOptions, default: str, label: str | None) -> ModelRewards:
    model = options.reward_model or default
    return ModelRewards(model, options.device, options.dtype, label=label, batch_size=options.reward_batch_size)
