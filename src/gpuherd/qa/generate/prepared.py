"""Everything about a run that is known before a GPU is taken: questions, prompts, end tokens, the guide.

It is made once and written into the run's folder. A later start of the same command reads it there, and is refused if
the settings, the data or the model have changed. ``resumed`` gives ``--resume`` the options of the first start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import BadModel, MissingExtra, MissingModel, UsageError
from gpuherd.jobs.options import foreign
from gpuherd.lm.guidance.guide import (
    FILE,
    HEAD_FILE,
    Guide,
    Head,
    Mode,
    read_form,
    refuse_mode,
    refuse_other_tokens,
    tokens_digest,
)
from gpuherd.lm.tokens import end_tokens_in, positions_in
from gpuherd.models.load.identity import ModelFiles, files_digest, model_files, reference, tokenizer_in
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.names import user_path
from gpuherd.qa.data.load import load_questions
from gpuherd.qa.data.questions import BadQuestions, QuestionSet, RefusedRow
from gpuherd.qa.folder import FORMAT, KIND, QADirectory
from gpuherd.qa.generate.config import (
    BACKEND_IN_RECORDS,
    GUIDING,
    NEUTRAL,
    PATHS,
    GenerateConfig,
    GuideOptions,
    resolved_path,
)
from gpuherd.qa.prompts.maker import PromptMaker, PromptTooLong, TokenizedPrompt
from gpuherd.qa.record import Question
from gpuherd.qa.runs import DamagedRun, record_of
from gpuherd.runs import records
from gpuherd.runs.files import create_file, sha256_of, write_lines
from gpuherd.runs.spec import begun_here, versions

# ---- a run that was begun: its run.json, questions and prompts -------------------------------------------------------

# Keys of run.json, besides the options, that every later start needs.
_NEEDED: tuple[tuple[str, type], ...] = (
    ("run_id", str),
    ("model_sha256", str),
    ("questions", int),
    ("questions_sha256", str),
    ("prompts_sha256", str),
    ("prompts_cut", int),
    ("refused", int),
    ("end_tokens", dict),
    ("stop", list),
    ("versions", dict),
)


def begun_record(folder: QADirectory) -> Mapping[str, Any]:
    """The content of run.json of a run that continues. Raises as ``record_of``; DamagedRun also if a key is missing."""
    record = record_of(folder)
    missing = [name for name, kind in _NEEDED if not isinstance(record.get(name), kind)]
    missing += [name for name in PATHS if name not in record["identity"]]
    if missing:
        raise DamagedRun(f"{folder.run_json} says nothing of {missing[0]}; remove {folder.root} to begin anew")
    return record


def refuse_other_settings(kept: Mapping[str, Any], config: GenerateConfig) -> None:
    """Raises UsageError, with the differences, if the run was begun with other settings."""
    ours, theirs = config.identity(), dict(kept["identity"])
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    if not names:
        return
    first = (f"{_flag(name)} {_word(theirs.get(name))}, not {_word(ours.get(name))}" for name in names[:3])
    differences = ", ".join(first)
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    raise UsageError(f"run {config.name()} was begun with {differences}{more}; give those, or another --run-id")


def refuse_change(kept: Mapping[str, Any], now: Mapping[str, Any], config: GenerateConfig) -> None:
    """Raises UsageError if the data, the examples, the model or the guide have changed since the run was begun."""
    for name, what in (
        ("source", config.dataset),
        ("examples_source", "the examples"),
        ("model_sha256", config.model),
        ("guide_sha256", config.guide),
    ):
        if _without_name(kept.get(name)) != _without_name(now.get(name)):
            raise UsageError(
                f"{what} has changed since run {config.name()} was begun; bring it back as it was, or give another "
                "--run-id to begin anew"
            )


def has_files(folder: QADirectory, kept: Mapping[str, Any]) -> bool:
    """Whether the files of questions, prompts and refused rows are there as run.json describes them."""
    try:
        there = sha256_of(folder.questions), sha256_of(folder.prompts), len(refused_before(folder))
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return there == (kept["questions_sha256"], kept["prompts_sha256"], kept["refused"])


def lengths(folder: QADirectory) -> tuple[int, ...]:
    """Tokens of each prompt."""
    with folder.prompts.open("rb") as file:
        return tuple(len(json.loads(line)["token_ids"]) for line in file)


def refused_before(folder: QADirectory) -> tuple[RefusedRow, ...]:
    """The rows that were refused. Raises OSError, ValueError, TypeError, KeyError."""
    with folder.refused.open("rb") as file:
        return tuple(records.read(RefusedRow, json.loads(line)) for line in file)


def _without_name(source: Any) -> Any:
    """A recorded source without its path, which is part of the identity."""
    return {name: value for name, value in source.items() if name != "name"} if isinstance(source, dict) else source


def _flag(name: str) -> str:
    """The flag that sets this key of an identity."""
    return "--backend" if name == BACKEND_IN_RECORDS else f"--{name.replace('_', '-')}"


def _word(value: Any) -> str:
    return "unset" if value is None else str(value) if value != [] else "none"


# ---- --resume --------------------------------------------------------------------------------------------------------

# Options of one start, which no later one inherits. (The record has no webhook: its address is a secret.)
OF_THE_MOMENT = frozenset({"dry_run", "enqueue_only", "webhook", "runs_dir", "run_id"})


def resumed(record: Mapping[str, Any], given: Mapping[str, Any], *, run_id: str, runs_dir: str) -> dict[str, Any]:
    """The options, by name, with which a run continues: its own, changed by those of this command line.

    Args:
        record: the content of its run.json.
        given: the options of this command line, by name.

    Raises:
        UsageError: an option on which its answers depend has another value, or the record is of another version.
    """
    kept = {name: value for name, value in record["config"].items() if name not in OF_THE_MOMENT}
    if "backend" not in kept:  # of a version in which the option was called --engine, and all jobs ran on one machine
        kept["backend"] = kept.pop(BACKEND_IN_RECORDS)
    unknown = sorted(kept.keys() - {each.name for each in fields(GenerateConfig)})
    if unknown:
        raise UsageError(f"run {run_id} has the option {unknown[0]!r}, unknown here: it is of another gpuherd")
    # Options of other engines have no meaning for this one.
    engine = given.get("engine", kept.setdefault("engine", LOCAL))
    kept = {name: value for name, value in kept.items() if name not in foreign(engine)}
    # As absolute paths, so that it can be continued from any folder.
    kept |= {name: record["identity"][name] for name in PATHS}
    kept |= {name: record["identity"][name] for name in GUIDING if name in record["identity"]}
    for name, value in given.items():
        if name in NEUTRAL or name == "dry_run":
            kept[name] = value
        elif _as_recorded(name, value) != kept.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"run {run_id} was begun with {flag} {kept.get(name)}; with another it is another run")
    listed = {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}
    return {**listed, "run_id": run_id, "runs_dir": runs_dir}


def _as_recorded(name: str, value: Any) -> Any:
    """A value as run.json has it: paths are absolute, tuples are lists."""
    if name in (*PATHS, "guide"):
        return resolved_path(name, value)
    return list(value) if isinstance(value, tuple) else value


# ---- the guide -------------------------------------------------------------------------------------------------------

_BOUNDLESS = 1 << 50


def resolved_guide(options: GuideOptions, tokenizer: Any) -> Guide | None:
    """The guide of a run with all its settings; None without ``--guide``.

    Raises MissingModel, BadModel if there is no classifier; UsageError if its tokenizer is not that of the policy
    (``tokenizer``), or its head does not go with the mode.
    """
    if options.guide is None:
        return None
    folder = user_path(options.guide)
    form = read_form(folder)
    guide = options.as_guide(Mode.BERNOULLI if form.head is Head.BERNOULLI else Mode.DISTRIBUTIONAL)
    refuse_mode(guide.mode, atoms=form.head is Head.ATOMS)
    tokens: Mapping[str, int] = tokenizer.get_vocab()
    if tokens_digest(tokens) != form.tokenizer_sha256:
        refuse_other_tokens(tokens, tokenizer_in(folder).get_vocab(), str(folder))
        raise BadModel(f"{folder}: its tokenizer is not the one that it was trained with ({FILE})")
    return Guide(str(folder.resolve()), guide.eta, guide.mode, guide.top_k)


def guide_bytes(guide: Guide | None, workload: Workload) -> int:
    """Memory that a classifier takes in addition to the model: weights, the cache of growing rows, and one pass over
    all candidates. 0 without a guide. Raises MissingModel, BadModel."""
    if guide is None:
        return 0
    from gpuherd.models.memory.kv_cache import Reserve
    from gpuherd.models.place.gpus import GpuSpec
    from gpuherd.models.place.planner import make_plan
    from gpuherd.models.place.resources import read_with_precision
    from gpuherd.models.place.result import AnswerRefusal

    architecture, precision = read_with_precision(guide.classifier, None)
    # Each step reads the candidates after the cached tokens: a pass of as many tokens as a short prompt has.
    at_once, longest = max(workload.prompt_tokens, guide.top_k), workload.new_tokens + guide.top_k
    plan = make_plan(
        architecture,
        [GpuSpec("0", "", total=0, free=_BOUNDLESS)],
        precision,
        Workload(workload.batch, at_once, longest),
        Reserve(context=0, fixed=0, share=0.0),
    )
    if isinstance(plan, AnswerRefusal):
        raise BadModel(f"{guide.classifier} can't be planned: {plan.reason}")
    return (plan.memory_mb << 20) + _head_bytes(Path(guide.classifier))


def _head_bytes(folder: Path) -> int:
    """Bytes of the head; one of kind Q is as wide as the vocabulary, for each atom. Raises BadModel."""
    try:
        return (folder / HEAD_FILE).stat().st_size
    except OSError as problem:
        raise BadModel(f"{folder / HEAD_FILE} can't be read: {problem.strerror}") from None


# ---- preparing -------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Track = Callable[[Sequence[T], str], Iterable[T]]
_NO_BOUND = 1 << 30  # tokenizers without a maximum length have a number above this


@dataclass(frozen=True)
class PreparedRun:
    """A run that can begin or continue.

    Attributes:
        record: what run.json holds, or will hold.
        lengths: tokens of each prompt, in the order of the questions.
        refused: rows that are not asked.
        cut: how many prompts have a shortened context.
        questions, prompts: the lines of their files; None if the files are there already.
    """

    record: Mapping[str, Any]
    lengths: tuple[int, ...]
    refused: tuple[RefusedRow, ...]
    cut: int
    questions: tuple[bytes, ...] | None = None
    prompts: tuple[bytes, ...] | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings in effect."""
        return tuple(self.record["stop"])

    @property
    def guide(self) -> Guide | None:
        """The guide of the answers, or None."""
        kept = self.record.get("guide")
        return None if kept is None else Guide.from_dict(kept)

    @property
    def thinks(self) -> bool:
        """Whether the model's chat template has tags for thoughts, so that answers may begin with one."""
        return self.record.get("thinks") is True

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lengths)


def prepare(
    config: GenerateConfig, kept: Mapping[str, Any] | None, folder: QADirectory, track: Track[Any]
) -> PreparedRun:
    """Reads the questions and makes the prompts, or reads both from the folder of a run that was begun.

    Args:
        kept: the content of run.json, if the run was begun.
        track: passes the questions on and shows their progress.

    Raises:
        BadQuestions, MissingQuestions: the data set can't be used.
        MissingModel, BadModel: there is no tokenizer.
        UsageError: options contradict each other; or the data or the model have changed since the run was begun.
    """
    found = load_questions(config, seed=config.seed)
    files = model_files(config.model, config.adapter)
    now = _content_digests(found, files, config, {} if kept is None else kept)
    if kept is not None:
        refuse_change(kept, now, config)
        if has_files(folder, kept):
            return PreparedRun(kept, lengths(folder), refused_before(folder), kept["prompts_cut"])
    made = _prepare_anew(config, found, files, now, track)
    if kept is None:
        return made
    if any(made.record[name] != kept[name] for name in ("prompts_sha256", "questions_sha256")):
        raise UsageError(
            f"run {config.name()} was begun with other prompts: the tokenizer, its library or the style has changed "
            "since; give another --run-id"
        )
    return PreparedRun(kept, made.lengths, made.refused, made.cut, made.questions, made.prompts)


def changed_models(config: GenerateConfig, kept: Mapping[str, Any]) -> list[str]:
    """The model and the guide of a run if they are on this machine and have changed since the run was begun."""
    folders: dict[str, tuple[str, tuple[Path, ...]]] = {}
    try:
        if reference(config.model).path is not None:
            folders["model_sha256"] = config.model, model_files(config.model, config.adapter).folders
        if config.guide is not None:
            folders["guide_sha256"] = config.guide, (user_path(config.guide),)
        return [
            named
            for name, (named, where) in folders.items()
            if files_digest(*where, recorded=kept.get(name)) != kept.get(name)
        ]
    except (BadModel, MissingExtra, MissingModel):
        return []  # a complete run does not need them


def write(prepared: PreparedRun, folder: QADirectory) -> None:
    """Writes the files that are missing, run.json first: from then on the name belongs to these settings.

    Raises UsageError if another start with other settings was first, CannotWrite.
    """
    text = json.dumps(prepared.record, indent=2, sort_keys=True).encode() + b"\n"
    there = json.loads(create_file(folder.run_json, text))
    for name in ("identity", "questions_sha256", "prompts_sha256"):
        if there.get(name) != prepared.record[name]:
            raise UsageError(f"another run began as {folder.root.name} at this moment; give another --run-id")
    if prepared.questions is None or prepared.prompts is None:
        return
    refused = map(_line, prepared.refused)
    # Files that a killed start left are replaced, and so are those that another start has just written: they are the
    # same.
    for path, lines in (
        (folder.questions, prepared.questions),
        (folder.prompts, prepared.prompts),
        (folder.refused, refused),
    ):
        write_lines(path, lines)


def _content_digests(
    found: QuestionSet, files: ModelFiles, config: GenerateConfig, kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the settings on which the answers depend: digests of the data, the model and its guide."""
    examples = found.examples_source
    guided = {}
    if config.guide is not None:
        folder = user_path(config.guide)
        guided = {"guide_sha256": files_digest(folder, recorded=kept.get("guide_sha256"))}
    return {
        **guided,
        "source": found.source.to_dict(),
        "examples_source": None if examples is None else examples.to_dict(),
        "model_sha256": files_digest(*files.folders, recorded=kept.get("model_sha256")),
    }


def _prepare_anew(
    config: GenerateConfig, found: QuestionSet, files: ModelFiles, now: Mapping[str, Any], track: Track[Any]
) -> PreparedRun:
    tokenizer = tokenizer_in(files.tokenizer_folder, trust_remote_code=config.trust_remote_code)
    guide = resolved_guide(config, tokenizer)
    maker = PromptMaker(
        config, found.examples, tokenizer, _most_prompt_tokens(files, tokenizer, config.max_new_tokens, guide)
    )
    prompted: list[tuple[Question, TokenizedPrompt]] = []
    refused = list(found.refused)
    for question in track(found.questions, "making prompts"):
        try:
            prompted.append((question, maker.prompt(question)))
        except PromptTooLong as problem:
            refused.append(RefusedRow(f"question {question.id}", question.id, str(problem)))
    if not prompted:
        raise BadQuestions(f"{config.dataset}: no question is left; the last was refused because {refused[-1].reason}")
    questions = tuple(_line(question) for question, _ in prompted)
    prompts = tuple(_line({"id": question.id, **asdict(prompt)}) for question, prompt in prompted)
    ends = end_tokens_in(files.config_folder, tokenizer)
    how = config.decoding(ends.ids, maker.stop)
    cut = sum(prompt.cut > 0 for _, prompt in prompted)
    record = {
        "format": FORMAT,
        "kind": KIND,
        "run_id": config.name(),
        # Without the webhook, whose address is a secret.
        "config": config.to_dict() | {"webhook": None},
        "identity": config.identity(),
        **now,
        **({} if guide is None else {"guide": guide.to_dict()}),
        **({"thinks": True} if maker.thinks else {}),
        "questions": len(prompted),
        "questions_sha256": _sha256(questions),
        "prompts": maker.identity,
        "prompts_sha256": _sha256(prompts),
        "prompts_cut": cut,
        "refused": len(refused),
        "end_tokens": ends.values(),
        "stop": list(how.stop),
        **begun_here(),
        "versions": versions("transformers"),
    }
    sizes = tuple(len(prompt.token_ids) for _, prompt in prompted)
    return PreparedRun(record, sizes, tuple(refused), cut, questions, prompts)


def _most_prompt_tokens(files: ModelFiles, tokenizer: Any, new_tokens: int, guide: Guide | None) -> int | None:
    """The most tokens of a prompt: the positions of the model and of its guide (the tokenizer's if neither has any)
    less those of an answer."""
    folders = [files.config_folder, *([] if guide is None else [Path(guide.classifier)])]
    positions = min((each for each in map(positions_in, folders) if each is not None), default=None)
    limit = getattr(tokenizer, "model_max_length", None)
    if positions is None and isinstance(limit, int) and 0 < limit < _NO_BOUND:
        positions = limit
    if positions is None:
        return None
    if positions <= new_tokens:
        raise UsageError(
            f"--max-new-tokens {new_tokens}: the model{'' if guide is None else ' or its guide'} has {positions} "
            "positions, prompt and answer together"
        )
    return positions - new_tokens


def _line(value: Any) -> bytes:
    return records.line_of(value).encode()


def _sha256(lines: Sequence[bytes]) -> str:
    """Of the file with these lines."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line + b"\n")
    return digest.hexdigest()
