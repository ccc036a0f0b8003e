"""A language model behind a statistic: which one answered, how it is loaded, and how probable words are behind prompts.

Texts of questions and answers are put on one line each, and what the tokenizer would read as a control token in them is
taken apart, so that no answer can end its line and go on with another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuherd.errors import BadModel, UsageError
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.memory.weights import Precision
from gpuherd.models.names import is_there, quoted

if TYPE_CHECKING:
    from gpuherd.lm.backend import PromptTokens
    from gpuherd.lm.model import LanguageModel
    from gpuherd.qa.record import Answered
    from gpuherd.qa.runs import Run

Word = tuple[tuple[int, ...], ...]  # the token ids of each way to write it, none the beginning of another

# A generator is loaded as it was for its answers, unless options say otherwise.
_AS_GENERATED = ("dtype", "quantization", "adapter", "merge_adapter", "trust_remote_code")
# Below this a model that decoded greedily would have said something else than any of the words that are weighed.
_FITTING_MASS = 0.5

OptionsT = TypeVar("OptionsT", bound=ModelOptions)


@dataclass(frozen=True, slots=True)
class Generator(Generic[OptionsT]):
    """The model that answered, as the run tells of it: its name as seen from here, its digest, and how it is loaded."""

    model: str
    sha256: str
    options: OptionsT


def generator_of(run: Run, options: OptionsT) -> Generator[OptionsT]:
    """The run's model. ``options``: those given now, which take precedence over those of the run.

    Raises UsageError where the run does not say which files it had.
    """
    config = run.config
    model = str(config["model"])
    inside = Path(str(run.record.get("cwd", "."))) / model
    if not is_there(model) and inside.exists():
        model = str(inside)
    before = {name: config.get(name) for name in _AS_GENERATED if not _is_given(name, options)}
    then = {name: value for name, value in before.items() if value is not None}
    then |= {name: Precision(then[name]) for name in ("dtype", "quantization") if name in then}
    sha256 = run.record.get("model_sha256")
    if not isinstance(sha256, str):
        raise UsageError(f"run {run.run_id} doesn't say which files its model had, so that it can't be used again")
    return Generator(model, sha256, replace(options, **then))


def load_settings(options: ModelOptions) -> dict[str, Any]:
    """How a language model is loaded, as far as numbers depend on it."""
    return {name: str(getattr(options, name)) for name in _AS_GENERATED if _is_given(name, options)}


def _is_given(name: str, options: ModelOptions) -> bool:
    return bool(getattr(options, name) != getattr(ModelOptions, name))


def unchanged_generator(options: OptionsT, run: Run) -> tuple[str, OptionsT]:
    """The name of the model that answered, and the options with how it is loaded.

    Raises BadModel where it is not the one that answered any more.
    """
    from gpuherd.models.load.identity import files_digest, model_files

    generator = generator_of(run, options)
    folders = model_files(generator.model, generator.options.adapter).folders
    if files_digest(*folders, recorded=generator.sha256) != generator.sha256:
        raise BadModel(
            f"{quoted(generator.model)} is not the model any more that answered: its files have changed; what it would "
            "say now says nothing about those answers"
        )
    return generator.model, generator.options


def longest_prompt(answers: Sequence[Answered]) -> int:
    """Tokens of the longest prompt that has a question and two of its answers in it, or more."""
    # A token has at least a byte: characters are at least as many as tokens, but for scripts whose letters take three.
    texts = [
        len(each.question.question) + 2 * max((len(one.token_ids) for one in each.which.values()), default=0)
        for each in answers
    ]
    return max(texts, default=0) + 128


class Weigher:
    """A language model that says how probable words are.

    Args:
        model: in memory.
        rows: the most prompts in one pass.
    """

    def __init__(self, model: LanguageModel, rows: int) -> None:
        self.model = model
        self._rows = rows

    def weigh(self, prompts: Sequence[PromptTokens], words: Sequence[Word]) -> list[tuple[float | None, ...] | None]:
        """For each prompt the natural log of each word's probability, all ways to write it together.

        None in place of a word that has no finite one, and in place of a prompt that the model has no room for.
        """
        from gpuherd.lm.forward import plan_batches

        longest = max((len(ids) for word in words for ids in word), default=1)
        room = self.model.most_positions
        fitting = [
            number for number, each in enumerate(prompts) if room is None or len(each.token_ids) + longest <= room
        ]
        ways = [ids for word in words for ids in word]
        found: list[tuple[float | None, ...] | None] = [None] * len(prompts)
        for batch in plan_batches([len(prompts[number].token_ids) for number in fitting], rows=self._rows):
            some = [fitting[place] for place in batch]
            for number, weighed in zip(some, self.model.weigh([prompts[each] for each in some], ways), strict=True):
                found[number] = tuple(_of_words(weighed, words))
        return found


def _of_words(weighed: Sequence[float | None], words: Sequence[Word]) -> list[float | None]:
    """The log of the sum of the probabilities of each word's ways."""
    values = iter(weighed)
    return [log_sum([next(values) for _ in word]) for word in words]


def log_sum(logs: Sequence[float | None]) -> float | None:
    """The log of the sum of the probabilities with these logs; None stands for none that is finite.

    >>> log_sum([None, None]) is None, log_sum([-2.0, None])
    (True, -2.0)
    """
    finite = [each for each in logs if each is not None]
    if not finite:
        return None
    highest = max(finite)
    return highest + math.log(math.fsum(math.exp(each - highest) for each in finite))


def mass_seen(words: str, masses: Sequence[float]) -> dict[str, Any]:
    """What a job saw of the words that it weighed: ``words`` is what they are called, ``masses`` their probability
    together, for each prompt."""
    return {"words": words, "mass": math.fsum(masses), "weighed": len(masses)}


def mass_remarks(seen: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A sentence where the model would have said something else than the words that were weighed."""
    weighed = sum(each.get("weighed", 0) for each in seen)
    if not weighed:
        return ()
    mean = math.fsum(each.get("mass", 0.0) for each in seen) / weighed
    if mean >= _FITTING_MASS:
        return ()
    words = next(str(each["words"]) for each in seen if each.get("weighed"))
    return (
        f"{words} had {mean:.2g} of the probability together, on average: the model would say something else, "
        "and what is made of their probabilities says little",
    )


def one_line(text: str, controls: Sequence[str]) -> str:
    """The text on one line, single spaces, control tokens taken apart.

    >>> one_line("Paris\\nIs it? </s>", ["</s>"])
    'Paris Is it? < /s>'
    """
    from gpuherd.qa.prompts.conversation import defused

    return defused(" ".join(text.split()), controls)
