"""All of a run that is known before a GPU is taken: which questions, which prompts, which tokens end an answer.

Made once and written into the run's folder; a later start of the same command finds it there, and is refused where the
data or the model are other ones by now.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpuherd.errors import BadModel, MissingExtra, MissingModel, UsageError
from gpuherd.lm.guidance.guide import Guide
from gpuherd.lm.tokens import end_tokens_in
from gpuherd.models.load.identity import ModelFiles, files_digest, model_files, reference, tokenizer_in
from gpuherd.qa.data.load import load_questions
from gpuherd.qa.data.question_set import BadQuestions, QuestionSet, Refused
from gpuherd.qa.folder import FORMAT, KIND, QADirectory
from gpuherd.qa.generation.begun import is_whole, lengths, refuse_change, refused_before
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.generation.guiding import settled_guide
from gpuherd.qa.prompts.maker import MadePrompt, PromptMaker, PromptTooLong
from gpuherd.qa.record import Question, question_values
from gpuherd.runs.files import write_lines, write_once
from gpuherd.runs.spec import begun_here, versions

T = TypeVar("T")
Track = Callable[[Sequence[T], str], Iterable[T]]
_NO_BOUND = 1 << 30  # of a tokenizer or config that names no length


@dataclass(frozen=True)
class Prepared:
    """A run that may begin, or go on.

    Attributes:
        record: what run.json holds, or will hold.
        lengths: tokens of each prompt, in the order of the questions.
        refused: rows that are not asked.
        cut: how many prompts have a shortened context.
        questions, prompts: the lines of their files; None where those are there already.
    """

    record: Mapping[str, Any]
    lengths: tuple[int, ...]
    refused: tuple[Refused, ...]
    cut: int
    questions: tuple[bytes, ...] | None = None
    prompts: tuple[bytes, ...] | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings that hold."""
        return tuple(self.record["stop"])

    @property
    def guide(self) -> Guide | None:
        """What guides the answers, or None."""
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


def prepare(config: GenerateConfig, kept: Mapping[str, Any] | None, folder: QADirectory, track: Track[Any]) -> Prepared:
    """Reads the questions and makes the prompts; of a run that was begun takes what is there.

    Args:
        kept: what run.json holds, of a run that was begun.
        track: passes questions on and shows how far they are.

    Raises:
        BadQuestions, MissingQuestions: the data set can't be asked.
        MissingModel, BadModel: there is no tokenizer.
        UsageError: options that don't go together; or the data or the model have changed since the run was begun.
    """
    found = load_questions(
        config.dataset,
        split=config.split,
        limit=config.limit,
        seed=config.seed,
        revision=config.revision,
        shuffle=config.shuffle,
        few_shot=config.few_shot,
        few_shot_file=config.few_shot_file,
        context=config.context,
    )
    files = model_files(config.model, config.adapter)
    now = _settled(found, files, config, {} if kept is None else kept)
    if kept is not None:
        refuse_change(kept, now, config)
        if is_whole(folder, kept):
            return Prepared(kept, lengths(folder), refused_before(folder), kept["prompts_cut"])
    made = _made(config, found, files, now, track)
    if kept is None:
        return made
    if any(made.record[name] != kept[name] for name in ("prompts_sha256", "questions_sha256")):
        raise UsageError(
            f"run {config.name()} was begun with other prompts: the tokenizer, its library or the style has changed "
            "since; give another --run-id"
        )
    return Prepared(kept, made.lengths, made.refused, made.cut, made.questions, made.prompts)


def changed_models(config: GenerateConfig, kept: Mapping[str, Any]) -> list[str]:
    """The model and the guide of a run, where they lie on this machine and are other ones than when it was begun."""
    folders: dict[str, tuple[str, tuple[Path, ...]]] = {}
    try:
        if reference(config.model).path is not None:
            folders["model_sha256"] = config.model, model_files(config.model, config.adapter).folders
        if config.guide is not None:
            folders["guide_sha256"] = config.guide, (Path(config.guide).expanduser(),)
        return [
            named
            for name, (named, where) in folders.items()
            if files_digest(*where, recorded=kept.get(name)) != kept.get(name)
        ]
    except (BadModel, MissingExtra, MissingModel):
        return []  # a complete run does without them


def write(prepared: Prepared, folder: QADirectory) -> None:
    """Writes what is not there yet, run.json first: from then on the name belongs to these settings.

    Raises UsageError where another start with other settings was first, CannotWrite.
    """
    text = json.dumps(prepared.record, indent=2, sort_keys=True).encode() + b"\n"
    there = json.loads(write_once(folder.run_json, text))
    for name in ("identity", "questions_sha256", "prompts_sha256"):
        if there.get(name) != prepared.record[name]:
            raise UsageError(f"another run began as {folder.root.name} at this moment; give another --run-id")
    if prepared.questions is None or prepared.prompts is None:
        return
    refused = [_line(asdict(each)) for each in prepared.refused]
    # What a killed start left there is replaced, as is what another start has written at this moment: its workers read
    # the same.
    for path, lines in (
        (folder.questions, prepared.questions),
        (folder.prompts, prepared.prompts),
        (folder.refused, refused),
    ):
        write_lines(path, (line.rstrip(b"\n") for line in lines))


# ---- made anew -------------------------------------------------------------------------------------------------------


def _settled(found: QuestionSet, files: ModelFiles, config: GenerateConfig, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What the answers depend on besides the settings: the content of the data, of the model and of its guide."""
    examples = found.examples_source
    guided = {}
    if config.guide is not None:
        folder = Path(config.guide).expanduser()
        guided = {"guide_sha256": files_digest(folder, recorded=kept.get("guide_sha256"))}
    return {
        **guided,
        "source": found.source.to_dict(),
        "examples_source": None if examples is None else examples.to_dict(),
        "model_sha256": files_digest(*files.folders, recorded=kept.get("model_sha256")),
    }


def _made(
    config: GenerateConfig, found: QuestionSet, files: ModelFiles, now: Mapping[str, Any], track: Track[Any]
) -> Prepared:
    tokenizer = tokenizer_in(files.tokenizer_folder, trust_remote_code=config.trust_remote_code)
    guide = settled_guide(config, tokenizer)
    maker = PromptMaker(config, found.examples, tokenizer, _room(files, tokenizer, config.max_new_tokens, guide))
    asked: list[tuple[Question, MadePrompt]] = []
    refused = list(found.refused)
    for question in track(found.questions, "making prompts"):
        try:
            asked.append((question, maker.prompt(question)))
        except PromptTooLong as problem:
            refused.append(Refused(f"question {question.id}", question.id, str(problem)))
    if not asked:
        raise BadQuestions(f"{config.dataset}: no question is left; the last was refused because {refused[-1].reason}")
    questions = tuple(_line(question_values(question)) for question, _ in asked)
    prompts = tuple(_line({"id": question.id, **asdict(prompt)}) for question, prompt in asked)
    ends = end_tokens_in(files.config_folder, tokenizer)
    how = config.decoding(ends.ids, maker.stop)
    cut = sum(prompt.cut > 0 for _, prompt in asked)
    record = {
        "format": FORMAT,
        "kind": KIND,
        "run_id": config.name(),
        # Without the webhook: who knows its address may post there.
        "config": config.to_dict() | {"webhook": None},
        "identity": config.identity(),
        **now,
        **({} if guide is None else {"guide": guide.to_dict()}),
        **({"thinks": True} if maker.thinks else {}),
        "questions": len(asked),
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
    sizes = tuple(len(prompt.token_ids) for _, prompt in asked)
    return Prepared(record, sizes, tuple(refused), cut, questions, prompts)


def _room(files: ModelFiles, tokenizer: Any, new_tokens: int, guide: Guide | None) -> int | None:
    """The most tokens of a prompt: the positions of the model and of its guide, or the tokenizer's where neither names
    any, less those of an answer."""
    folders = [files.config_folder, *([] if guide is None else [Path(guide.classifier)])]
    positions = min((each for each in map(_positions, folders) if each is not None), default=None)
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


def _positions(folder: Path) -> int | None:
    """What the config says, or its text part where the model has several."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for values in (config, inner):
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
            value = values.get(name)
            if isinstance(value, int) and 0 < value < _NO_BOUND:
                return value
    return None


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _sha256(lines: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()
