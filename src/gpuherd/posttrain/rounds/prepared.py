"""What is looked at before any GPU is taken: tasks and their problems, models and whether their tokens are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.guidance.tokens import refuse_other_tokens
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.preference.proxy import refuse_other_tokens as refuse_other_proxy
from gpuherd.posttrain.preference.reward_model import refuse_base
from gpuherd.posttrain.problem import Problem
from gpuherd.posttrain.rounds.choices import Choice
from gpuherd.posttrain.rounds.settings import Settings
from gpuherd.posttrain.rounds.tasks import evaluation_problems, make_dataset, training_problems
from gpuherd.qa.working.model_files import model_files
from gpuherd.qa.working.model_files import reference as model_reference

# What a chat template adds to a message, at most, in tokens.
_TEMPLATE = 64
_MOST_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Prepared:
    """An experiment that can begin.

    Attributes:
        choices: its algorithms.
        problems: how many are trained on, by data set.
        evaluated: how many are evaluated on, by data set.
        prompt_tokens: of the longest prompt at most, by data set: a token is a byte or more.
        reward_models: of the data sets whose completions a model scores.
        right_or_wrong: data sets whose completions are right or wrong and earn nothing else.
        inputs: a digest of each data set's problems and of each model's files: a run doesn't go on with others.
    """

    choices: tuple[Choice, ...]
    problems: Mapping[str, int]
    evaluated: Mapping[str, int]
    prompt_tokens: Mapping[str, int]
    reward_models: Mapping[str, str]
    right_or_wrong: frozenset[str]
    inputs: Mapping[str, str]


def prepare(settings: Settings) -> Prepared:
    """Looks at all that the experiment names. Raises UsageError, MissingModel, BadModel; what reading data raises."""
    choices = settings.choices()
    problems: dict[str, int] = {}
    evaluated: dict[str, int] = {}
    longest: dict[str, int] = {}
    inputs: dict[str, str] = {}
    reward_models: dict[str, str] = {}
    right_or_wrong: set[str] = set()
    asked_on = dict.fromkeys(name for trained in settings.trained_on() for name in settings.evaluated_on(trained))
    for name in dict.fromkeys((*settings.trained_on(), *asked_on)):
        task = make_dataset(settings, name)
        scoring = getattr(task, "reward_model", None)
        if scoring is not None:
            reward_models[name] = scoring
        if task.verifiable:
            right_or_wrong.add(name)
        try:
            if name in settings.trained_on():
                found = training_problems(settings, name, task)
                problems[name] = len(found)
                inputs[f"datasets.{name}, training"] = _digest(found)
                longest[name] = _longest(found, settings)
            if name in asked_on:
                found = evaluation_problems(settings, name, task)
                evaluated[name] = len(found)
                inputs[f"datasets.{name}, evaluation"] = _digest(found)
                longest[name] = max(longest.get(name, 0), _longest(found, settings))
        finally:
            task.close()
    guided = any(choice.guided for choice in choices)
    for name, family in settings.families().items():
        inputs[f"models.{name}.reference"] = model_files(family.reference, family.adapter).sha256
        if guided and family.value is not None:
            inputs[f"models.{name}.value"] = model_files(family.value).sha256
            _refuse_other_tokens(name, family.reference, family.value)
        for choice in choices:
            if isinstance(choice.options, ProxyOptions):
                proxy = choice.options.proxy_base(family.value, family.reference)
                inputs[f"algos.{choice.name}.proxy_model, models.{name}"] = model_files(proxy).sha256
                _refuse_proxy(f"algos.{choice.name}, models.{name}", family.reference, proxy)
    return Prepared(choices, problems, evaluated, longest, reward_models, frozenset(right_or_wrong), inputs)


def refuse_others(begun: Mapping[str, str], now: Mapping[str, str], where: Path) -> None:
    """Raises UsageError where a run was begun with other problems or models than there are now."""
    changed = [name for name in now if begun.get(name, now[name]) != now[name]]
    if changed:
        raise UsageError(
            f"{where} was begun with other problems or model files than there are now: {', '.join(changed)}; put them "
            "back, or begin another run (another experiment.name)"
        )


def _digest(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for each in problems:
        words = [each.id, each.prompt, *each.answers, *(f"{name}={value}" for name, value in each.hidden.items())]
        digest.update(json.dumps(words).encode())
    return digest.hexdigest()


def _longest(problems: Sequence[Problem], settings: Settings) -> int:
    most = max(len(each.prompt.encode("utf-8", "replace")) for each in problems)
    return max(1, most + (_TEMPLATE if settings.generation.use_chat_template else 2))


def _refuse_other_tokens(name: str, reference: str, value: str) -> None:
    """Raises UsageError where both tokenizers can be read and differ; where not, the training looks at them."""
    ours, theirs = vocabulary(reference), vocabulary(value)
    if ours is not None and theirs is not None:
        try:
            refuse_other_tokens(ours, theirs, value)
        except UsageError as problem:
            raise UsageError(f"models.{name}: {problem}") from None


def _refuse_proxy(where: str, reference: str, proxy: str) -> None:
    """Raises UsageError, BadModel where a proxy can't start from this model, or would read other tokens."""
    ours, theirs = vocabulary(reference), vocabulary(proxy)
    try:
        refuse_base(proxy, model_reference(proxy).path or model_files(proxy).config_folder)
        if ours is not None and theirs is not None:
            refuse_other_proxy(ours, theirs, proxy)
    except (UsageError, BadModel) as problem:
        raise type(problem)(f"{where}: {problem}") from None


def vocabulary(model: str) -> dict[str, int] | None:
    """Token -> id of a model's tokenizer.json, added tokens included; None where it has none of a form known here.

    Raises MissingModel, BadModel.
    """
    path = Path(model_files(model).tokenizer_folder) / "tokenizer.json"
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        found = json.loads(path.read_bytes())
        words = found["model"]["vocab"]
        tokens = dict(words) if isinstance(words, dict) else {word: number for number, (word, _) in enumerate(words)}
        tokens |= {each["content"]: each["id"] for each in found.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return tokens
