"""The options of a run of answers, and those on which its answers depend."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.run_dir import safe_name
from gpuherd.lm.backend import Decoding
from gpuherd.lm.guidance.guide import Guide, Mode
from gpuherd.models.load.options import WorkOptions
from gpuherd.models.names import is_there, user_path
from gpuherd.options import option
from gpuherd.qa.data.load import QuestionOptions
from gpuherd.qa.data.readers.registry import dataset_readers
from gpuherd.qa.folder import RunsOptions
from gpuherd.qa.prompts.maker import STYLES, PromptOptions
from gpuherd.runs.records import jsonable
from gpuherd.units import count, positive_int, whole_number

BackendName = Literal["transformers", "vllm"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

# Hex digits of the identity in a run's name, and the most characters of the model and of the data set.
_DIGITS, _LONGEST_PART = 8, 40
# Options on which no answer depends. (A device map moves layers, and so at most the last bit.)
NEUTRAL = frozenset(
    {"device_map", "parallel", "allow_offload", "runs_dir", "run_id", "shards", "retries", "dry_run", "enqueue_only"}
    | {each.name for each in fields(DispatchOptions)}
)
# The backend's key in records: the option had that name once, and names of runs are digests of their records.
BACKEND_IN_RECORDS = "engine"
# Options that may be paths.
PATHS = ("model", "dataset", "few_shot_file", "adapter", "prompt")


def number(word: str) -> float:
    """A number. Raises ValueError with a sentence."""
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number") from None


def with_escapes(word: str) -> str:
    """A stop string as typed in a shell: ``\\n`` and ``\\t`` are a line break and a tab, ``\\\\`` is a backslash.

    Before any other letter a backslash stands for itself.
    """
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t", "\\": "\\"}.get(found[1], found[0]), word)


def _mode(word: str) -> Mode:
    try:
        return Mode(word)
    except ValueError:
        raise ValueError(f"{word!r} is none of {', '.join(Mode)}") from None


# An option of a group.
_guidance = partial(option, group="guidance")
_answers = partial(option, group="answers")


@dataclass(frozen=True, kw_only=True)
class GuideOptions:
    """How a classifier guides the answers. Raises UsageError for other options of guidance without ``--guide``."""

    guide: str | None = _guidance(
        None,
        help="guide the answers by the classifier (Q#, PITA, CD) in this folder; the log-probs stay those of the model",
        metavar="CLASSIFIER",
    )
    eta: float | None = _guidance(
        None,
        help="weight of the divergence from the model, as in the papers: small values guide strongly (default: 0.1)",
        parse=number,
        metavar="ETA",
    )
    guide_mode: Mode | None = _guidance(
        None,
        help="term that is added to a candidate's log-prob (default: bernoulli, or distributional if the classifier "
        "predicts several rewards; expectation is CD)",
        parse=_mode,
        choices=tuple(Mode),
    )
    guide_top_k: int | None = _guidance(
        None,
        help="the N most probable tokens of the model are the candidates of each step (default: 20)",
        parse=whole_number,
        metavar="N",
    )

    def __post_init__(self) -> None:
        if self.guide is None:
            for name in GUIDING[1:]:
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name.replace('_', '-')} without --guide: nothing is guided")
            return
        if self.eta is not None and not math.isfinite(self.eta):
            raise UsageError("--eta: it is finite; without --guide nothing is guided")
        self.as_guide(Mode.EXPECTATION)  # refuses numbers out of range

    def as_guide(self, usual: Mode) -> Guide:
        """The guide that the options describe; ``usual``: the mode if ``--guide-mode`` is not given."""
        assert self.guide is not None  # noqa: S101 - callers have checked it
        guide = Guide(self.guide, mode=usual if self.guide_mode is None else Mode(self.guide_mode))
        return replace(
            guide,
            eta=guide.eta if self.eta is None else self.eta,
            top_k=guide.top_k if self.guide_top_k is None else self.guide_top_k,
        )


GUIDING = tuple(each.name for each in fields(GuideOptions))


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are decoded."""

    greedy: bool = _answers(False, help="decode one answer greedily (also without --samples)")
    samples: int = _answers(0, help="sample K answers to each question", parse=count, metavar="K")
    temperature: float = _answers(
        1.0, help="sampling temperature; the recorded log-probs are those of the model at temperature 1", parse=number
    )
    top_p: float = _answers(1.0, help="sample from the most probable tokens with this total probability", parse=number)
    top_k: int = _answers(0, help="sample from the N most probable tokens (0: all)", parse=count, metavar="N")
    max_new_tokens: int = _answers(
        64, help="maximum tokens of an answer, with its end token", parse=positive_int, metavar="N"
    )
    stop: tuple[str, ...] = _answers(
        (),
        help=r"end an answer before any of these texts (\n is a line break; default: those of the prompt's style)",
        parse=with_escapes,
        many=True,
        metavar="TEXT",
    )
    seed: int = _answers(0, help="seed of sampling, examples and order", parse=count, metavar="N")
    exact: bool = _answers(
        False, help="decode one question at a time, so that in any dtype no answer depends on its batch or shard"
    )
    backend: BackendName = _answers(
        "transformers", help="library that decodes; vllm must be installed", choices=BACKENDS
    )


def _no_backend(word: str) -> str:
    """A word for ``--engine``, unchanged. Raises UsageError for a word that belongs to ``--backend``."""
    if word in BACKENDS:
        raise UsageError(f"what computes the answers is --backend {word}; --engine is where the jobs run")
    return word


_ENGINE = next(each for each in fields(DispatchOptions) if each.name == "engine")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(WorkOptions, RunsOptions, QuestionOptions, PromptOptions, GuideOptions, AnswerOptions):
    """All options of a run of answers. Raises UsageError for values out of range or that contradict each other."""

    model: str = option(
        help="a Hugging Face id, a folder, or a known name; append -8bit or -4bit to quantise it",
        metavar="MODEL",
        group="model",
    )
    engine: str = field(default="local", metadata={"option": _ENGINE.metadata["option"]._replace(parse=_no_backend)})
    run_id: str | None = option(
        None,
        help="name of the run (default: made of model, data set and settings, so that the same command continues it)",
        metavar="NAME",
        group="runs",
    )

    def __post_init__(self) -> None:
        _no_backend(self.engine)
        WorkOptions.__post_init__(self)
        QuestionOptions.__post_init__(self)
        GuideOptions.__post_init__(self)
        object.__setattr__(self, "stop", tuple(self.stop))
        for name in (*PATHS, "guide", "runs_dir", "run_id"):
            _refuse_unusable_text(name, getattr(self, name))
        for text in self.stop:
            if not text:
                raise UsageError("--stop: an empty text would end every answer at its beginning")
        if self.backend not in BACKENDS:
            raise UsageError(f"backend={self.backend!r}; possible: {', '.join(BACKENDS)}")
        if self.backend == "vllm" and self.share:
            raise UsageError("--share with --backend vllm: vLLM takes nearly all memory of its GPUs")
        if self.guide is not None and (self.backend == "vllm" or self.parallel == "tensor"):
            other = "--backend vllm" if self.backend == "vllm" else "--parallel tensor"
            raise UsageError(f"--guide with {other}: a guide sees every step of our own decoding, on one process")
        if self.run_id is not None and safe_name(self.run_id) != self.run_id:
            raise UsageError(
                f"--run-id {self.run_id!r}: a run's name has letters, digits and . _ + = @ - in it, at most 120, and "
                "begins with none of . and -"
            )
        self.decoding()  # refuses numbers out of range

    def decoding(self, end_ids: tuple[int, ...] = (), stop: tuple[str, ...] = ()) -> Decoding:
        """How answers are decoded: the options, the end tokens, and the style's stop strings if ``--stop`` has none."""
        return Decoding(
            greedy=self.greedy or self.samples == 0,
            samples=self.samples,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            end_ids=end_ids,
            stop=self.stop or stop,
            seed=self.seed,
        )

    @property
    def rows(self) -> int:
        """Questions in a batch: each has as many sequences as answers."""
        how = self.decoding()
        return 1 if self.exact else max(1, self.batch_size // (how.samples + how.greedy))

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values: dict[str, Any] = jsonable(self)
        return values

    def identity(self) -> dict[str, Any]:
        """The options on which the answers depend: two commands with equal identities mean the same run.

        Paths are absolute. In exact mode the batch size is left out.
        """
        values = {name: value for name, value in self.to_dict().items() if name not in NEUTRAL}
        for name in PATHS:
            values[name] = resolved_path(name, values[name])
        values[BACKEND_IN_RECORDS] = values.pop("backend")
        values["greedy"] = self.decoding().greedy
        if self.guide is None:  # runs without a guide keep the names of versions that had none
            for name in GUIDING:
                del values[name]
        else:
            guide = self.as_guide(Mode.BERNOULLI)
            values |= {"guide": resolved_path("guide", guide.classifier), "eta": guide.eta, "guide_top_k": guide.top_k}
        if self.exact:
            del values["batch_size"]
        return values

    def name(self) -> str:
        """The run's name: ``run_id``, or a name made of the model, the data set and the identity."""
        if self.run_id is not None:
            return self.run_id
        text = json.dumps(self.identity(), sort_keys=True)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
        return f"{_part(self.model)}-{_part(self.dataset)}-{digest}"


def _part(text: str) -> str:
    """The last part of a path or an id, as a part of a file name."""
    path = Path(text)
    stem = path.stem if path.suffix.lower() in _FILES else path.name
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", stem.partition(":")[0]).strip("-._")
    return safe[:_LONGEST_PART].rstrip("-._") or "run"


_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".safetensors")


def resolved_path(name: str, value: str | None) -> str | None:
    """A relative path as an absolute one, so that a file has one name from every folder; a known name as it is, even
    if a file has that name."""
    if value is None or (name == "prompt" and value in STYLES) or (name == "dataset" and value in dataset_readers()):
        return value
    if not is_there(value):
        return value
    path = user_path(value)
    # Links are not followed: a snapshot of the Hub has links, whose suffixes tell the format.
    return str(path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name)


def _refuse_unusable_text(name: str, value: str | None) -> None:
    if value is None:
        return
    if not value or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UsageError(f"--{name.replace('_', '-')} {value!r} is no usable name")
