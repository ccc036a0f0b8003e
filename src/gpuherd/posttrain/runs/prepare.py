"""Checks before any GPU is taken: data sets and their problems, models and whether their tokens are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.guidance.guide import first_difference, refuse_other_tokens
from gpuherd.models.load.identity import files_digest, model_files
from gpuherd.models.load.identity import reference as model_reference
from gpuherd.posttrain.data.chat import refuse_without_template
from gpuherd.posttrain.data.dataset import DataTask
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.preference_rows import CONVERSATION, conversation_of
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.engine.callbacks import check_callbacks
from gpuherd.posttrain.preference.proxy import ProxyOptions
from gpuherd.posttrain.preference.proxy import refuse_other_tokens as refuse_other_proxy
from gpuherd.posttrain.preference.reward_model import refuse_base
from gpuherd.posttrain.rewards.function import FunctionTask
from gpuherd.posttrain.rollout.lengths import Texts, check_lengths
from gpuherd.posttrain.rollout.vllm import COLLECTING, EVALUATING, require_vllm
from gpuherd.posttrain.runs.blocks import DTYPES
from gpuherd.posttrain.runs.settings import AlgorithmConfig, Settings
from gpuherd.posttrain.types import BackendName, Problem, Split, Task
from gpuherd.qa.data.questions import BadQuestions


def make_dataset(settings: Settings, name: str, device: str = "cpu") -> Task:
    """The task of a data set's name. Raises UsageError, naming its key, and what reading data raises."""
    told = settings.dataset(name)
    try:
        options = TaskOptions(
            settings=told.settings,
            reward_model=told.reward_model,
            reward=told.reward,
            reward_timeout=told.reward_timeout,
            device=device,
            dtype=None if told.reward_dtype is None else DTYPES[told.reward_dtype],
            reward_batch_size=settings.data_collection.reward_batch_size,
            processes=told.processes,
            allow_unconfined=told.allow_unconfined,
        )
        return make_task(name if told.task is None else told.task, options)
    except UsageError as problem:
        raise UsageError(f"datasets.{name}: {problem}") from None


def reward_input(dataset: str) -> str:
    """The key of a run's inputs for the digest of the function that scores a data set."""
    return f"datasets.{dataset}, reward"


def training_problems(settings: Settings, name: str, task: Task) -> list[Problem]:
    """The problems that every round asks. Raises UsageError where there are not so many."""
    told = settings.data_collection
    return list(_problems(task, Split.TRAIN, told.max_examples, told.seed, "data_collection", name))


def evaluation_problems(settings: Settings, name: str, task: Task) -> list[Problem]:
    """The problems that every evaluation on this data set asks. Raises UsageError where there are not so many."""
    told = settings.evaluation
    seed = settings.data_collection.seed
    return list(_problems(task, Split(told.split), told.max_examples, seed, "evaluation", name))


def _problems(task: Task, split: Split, count: int, seed: int, block: str, name: str) -> list[Problem]:
    try:
        found = list(task.problems(split, count or None, seed))
    except UsageError as problem:
        raise UsageError(f"{block}.max_examples, {name}: {problem}") from None
    if not found:
        which = f"problem{'' if split is Split.TRAIN else ' with an answer'}"
        raise BadQuestions(
            f"datasets.{name}: the split {split} has no {which}; a file is divided into splits: bring more problems, "
            "or name a file for the test (settings.test_data)"
        )
    if len({each.id for each in found}) < len(found):
        raise BadQuestions(f"datasets.{name}: two problems have one id")
    return found


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
        splits: how many problems the splits of a data set have that is read from files or the Hub, as far as they were
            read.
        prompt_tokens: of the longest prompt at most, by data set: a token is a byte or more.
        imitated: what algorithms that imitate answers learn from, by data set.
        reward_models: of the data sets whose completions a model scores.
        warnings: of options that are seldom meant, and of answers that exceed a model's context length.
        right_or_wrong: data sets whose completions are right or wrong and earn nothing else.
        inputs: a digest of each data set's problems, of each reward function and of each model's files: a run doesn't
            go on with others.
    """

    choices: tuple[AlgorithmConfig, ...]
    problems: Mapping[str, int]
    evaluated: Mapping[str, int]
    splits: Mapping[str, Mapping[Split, int]]
    prompt_tokens: Mapping[str, int]
    imitated: Mapping[str, Texts]
    reward_models: Mapping[str, str]
    warnings: tuple[str, ...]
    right_or_wrong: frozenset[str]
    inputs: Mapping[str, str]


def prepare(settings: Settings, recorded: Mapping[str, str] | None = None) -> Prepared:
    """Looks at all that the experiment names.

    Args:
        recorded: ``inputs`` of the run that goes on.

    Raises UsageError, MissingModel, BadModel; what reading data raises.
    """
    choices = settings.choices()
    odd_options = _option_warnings(settings, choices)
    check_callbacks(settings.callbacks)
    for key, block in ((COLLECTING, settings.generation), (EVALUATING, settings.evaluation)):
        if block.backend is BackendName.VLLM:
            for family in settings.families().values():
                require_vllm(family.reference, settings.system.precision, key)
    asked_on = dict.fromkeys(name for trained in settings.trained_on() for name in settings.evaluated_on(trained))
    names = dict.fromkeys((*settings.trained_on(), *asked_on))
    data = {name: _look_at_data(settings, choices, name, evaluated=name in asked_on) for name in names}
    inputs = {key: digest for each in data.values() for key, digest in each.inputs.items()}
    inputs |= _look_at_models(settings, choices, recorded or {})
    return Prepared(
        choices=choices,
        problems={name: each.counts[_TRAINING] for name, each in data.items() if _TRAINING in each.counts},
        evaluated={name: each.counts[_EVALUATION] for name, each in data.items() if _EVALUATION in each.counts},
        splits={name: each.splits for name, each in data.items() if each.splits},
        prompt_tokens={name: each.prompt_tokens for name, each in data.items()},
        imitated={name: each.imitated for name, each in data.items() if each.imitated is not None},
        reward_models={name: each.reward_model for name, each in data.items() if each.reward_model is not None},
        warnings=odd_options + _short(settings, choices, {name: each.texts for name, each in data.items()}),
        right_or_wrong=frozenset(name for name, each in data.items() if each.right_or_wrong),
        inputs=inputs,
    )


_TRAINING, _EVALUATION = "training", "evaluation"


@dataclass(slots=True)
class _Data:
    """What is known of a data set: ``Prepared`` says what; by what its problems are for, and its texts."""

    right_or_wrong: bool
    reward_model: str | None
    prompt_tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    splits: Mapping[Split, int] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    texts: list[Texts] = field(default_factory=list)
    imitated: Texts | None = None


def _look_at_data(settings: Settings, choices: Sequence[AlgorithmConfig], name: str, *, evaluated: bool) -> _Data:
    """Reads a data set's problems, as far as they are asked. Raises UsageError; what reading data raises."""
    task = make_dataset(settings, name)
    data = _Data(task.verifiable, getattr(task, "reward_model", None))
    asked: list[list[Problem]] = []
    try:
        as_asked = [each.make().evaluated(task) for each in choices]  # some algorithms ask for more in their prompts
        for kind, problems_of, wanted in (
            (_TRAINING, training_problems, name in settings.trained_on()),
            (_EVALUATION, evaluation_problems, evaluated),
        ):
            if not wanted:
                continue
            asked.append(found := problems_of(settings, name, task))
            data.counts[kind] = len(found)
            data.inputs[f"datasets.{name}, {kind}"] = _digest(found)
            put = [problems_of(settings, name, each) for each in as_asked if each is not task]
            data.prompt_tokens = max(data.prompt_tokens, *(_longest(each, settings) for each in (found, *put)))
            data.texts.append(Texts([each.prompt for each in found]))
            _check_conversations(name, settings, choices if kind == _TRAINING else (), found)
            if kind == _TRAINING and any(each.make().imitates for each in choices):
                data.imitated = _imitated(found)
                data.texts.append(data.imitated)
        if isinstance(task, FunctionTask):
            data.inputs[reward_input(name)] = _checked_reward(name, task, asked)
        if isinstance(task, DataTask | FunctionTask):
            data.splits = task.split_sizes
    finally:
        task.close()
    return data


def _look_at_models(
    settings: Settings, choices: Sequence[AlgorithmConfig], recorded: Mapping[str, str]
) -> dict[str, str]:
    """The digests of all models' files. Raises UsageError for tokens that differ, MissingModel, BadModel."""
    inputs: dict[str, str] = {}

    def add(what: str, model: str, adapter: str | None = None) -> None:
        inputs[what] = files_digest(*model_files(model, adapter).folders, recorded=recorded.get(what))

    for name, family in settings.families().items():
        add(f"models.{name}.reference", family.reference, family.adapter)
        if family.value is not None and any(choice.guided for choice in choices):
            add(f"models.{name}.value", family.value)
            _refuse_other_tokens(name, family.reference, family.value)
        for choice in choices:
            for model in choice.make().frozen_models:
                add(f"algos.{choice.name}: {model}", model)
                refuse_frozen(f"algos.{choice.name}, models.{name}", family.reference, model)
            if isinstance(choice.options, ProxyOptions):
                proxy = choice.options.proxy_base(family.value, family.reference)
                add(f"algos.{choice.name}.proxy_model, models.{name}", proxy)
                refuse_proxy(f"algos.{choice.name}, models.{name}", family.reference, proxy)
    return inputs


def _imitated(problems: Sequence[Problem]) -> Texts:
    """The texts that SFT learns from, each with all that stands before it."""
    pairs: list[tuple[str, str]] = []
    for each in problems:
        conversation = conversation_of(each)
        if conversation is not None:
            pairs += conversation.texts
        elif each.answers:
            pairs.append((each.prompt, each.answers[0]))
    return Texts([prompt for prompt, _ in pairs], [answer for _, answer in pairs])


def _check_conversations(
    name: str, settings: Settings, choices: Sequence[AlgorithmConfig], problems: Sequence[Problem]
) -> None:
    """Raises UsageError for conversations that no chat template writes, and for an algorithm that asks for answers to
    some that say none."""
    talks = [each for each in problems if CONVERSATION in each.hidden or each.chat]
    if not talks:
        return
    where = f"datasets.{name}: {len(talks)} of its problems are conversations with several answers or tools"
    if not settings.generation.use_chat_template:
        raise UsageError(f"{where}, which the chat template writes; set generation.use_chat_template=true")
    for family in settings.families().values():
        try:
            refuse_without_template(model_files(family.reference).tokenizer_folder, family.reference)
        except UsageError as problem:
            raise UsageError(f"{where}: {problem}") from None
    silent = sum(not each.answers for each in talks)
    asking = [each.name for each in choices if not each.make().imitates]
    if silent and asking:
        raise UsageError(
            f"{where}, and in {silent} the assistant calls tools alone: SFT learns from them, and {', '.join(asking)} "
            "can't ask for an answer; leave these rows out, or train that on other data"
        )


def _option_warnings(settings: Settings, choices: Sequence[AlgorithmConfig]) -> tuple[str, ...]:
    """The algorithms' warnings of their options (``Algorithm.check``), with whole keys. Raises UsageError."""
    found = []
    for each in choices:
        key = f"algos.{each.name}"
        try:
            found += [f"{key}.{warning}" for warning in each.make().check(settings.generation.sampling(0))]
        except UsageError as problem:
            raise UsageError(f"{key}.{problem}") from None
    return tuple(found)


def _checked_reward(name: str, task: FunctionTask, asked: Sequence[Sequence[Problem]]) -> str:
    """The digest of a data set's reward function, which can score these splits. Raises UsageError."""
    try:
        return [task.scoring.check(some) for some in asked][-1]
    except UsageError as problem:
        raise UsageError(f"datasets.{name}: {problem}") from None


def _short(
    settings: Settings, choices: Sequence[AlgorithmConfig], texts: Mapping[str, Sequence[Texts]]
) -> tuple[str, ...]:
    """Warnings where prompt and answer together exceed a model's context length. Raises UsageError for prompts and
    answers to imitate that exceed it by themselves."""
    told = settings.generation
    found = []
    guided = any(choice.guided for choice in choices)
    frozen = [model for each in choices for model in each.make().frozen_models]
    for name, family in settings.families().items():
        value = [family.value] if guided and family.value is not None else []
        for model in dict.fromkeys((family.reference, *value, *frozen)):
            for dataset, some in texts.items():
                where = f"datasets.{dataset} with models.{name}"
                try:
                    warnings = [
                        check_lengths(each, model, told.max_new_tokens, chat=told.use_chat_template) for each in some
                    ]
                except UsageError as problem:
                    raise UsageError(f"{where}: {problem}") from None
                found += [f"{where}: {each}" for each in warnings if each is not None]
    return tuple(dict.fromkeys(found))


def refuse_others(begun: Mapping[str, str], now: Mapping[str, str], where: Path) -> None:
    """Raises UsageError where a run was begun with other problems or models than there are now."""
    changed = [name for name in now if begun.get(name, now[name]) != now[name]]
    if changed:
        raise UsageError(
            f"{where} was begun with other problems, rewards or model files than there are now: {', '.join(changed)}; "
            "put them back, or begin another run (another experiment.name)"
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
    both = _vocabularies(reference, value)
    try:
        if both is not None:
            refuse_other_tokens(*both, value)
    except UsageError as problem:
        raise UsageError(f"models.{name}: {problem}") from None


def refuse_proxy(where: str, reference: str, proxy: str) -> None:
    """Raises UsageError, BadModel where a proxy can't start from this model, or would read other tokens."""
    both = _vocabularies(reference, proxy)
    try:
        refuse_base(proxy, model_reference(proxy).path or model_files(proxy).config_folder)
        if both is not None:
            refuse_other_proxy(*both, proxy)
    except (UsageError, BadModel) as problem:
        raise type(problem)(f"{where}: {problem}") from None


def refuse_frozen(where: str, reference: str, model: str) -> None:
    """Raises UsageError where a further model of an algorithm reads other tokens than the policy."""
    both = _vocabularies(reference, model)
    difference = None if both is None else first_difference(*both, model)
    if difference is not None:
        raise UsageError(
            f"{where}: {model} has another tokenizer than {reference}: {difference}. It reads the policy's tokens: "
            "choose a model of the policy's family"
        )


def _vocabularies(one: str, other: str) -> tuple[dict[str, int], dict[str, int]] | None:
    """Those of two models; None where one can't be read."""
    ours, theirs = vocabulary(one), vocabulary(other)
    return None if ours is None or theirs is None else (ours, theirs)


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
