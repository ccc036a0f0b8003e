"""The options of a run of answers, and which of them its answers depend on."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.run_dir import safe_name
from gpuherd.lm.backend import Decoding
from gpuherd.lm.guidance.guide import Mode
from gpuherd.models.load.job_options import WorkOptions
from gpuherd.options import option
from gpuherd.qa.data.adapters.registry import adapters
from gpuherd.qa.data.options import QuestionOptions
from gpuherd.qa.folder import RunsOptions
from gpuherd.qa.generation.guiding import GuideOptions
from gpuherd.qa.prompts.options import PromptOptions
from gpuherd.qa.prompts.style import STYLES
from gpuherd.runs.records import plain
from gpuherd.units import count, positive_int

Backend = Literal["transformers", "vllm"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# How many hex digits of the identity stand in a run's name, and how much of the model's and the data set's.
_DIGITS, _LONGEST_PART = 8, 40
# Where and how fast the answers come, not what they are. (A device map moves layers, and so at most the last bit.)
NEUTRAL = frozenset(
    {"device_map", "parallel", "allow_offload", "runs_dir", "run_id", "shards", "retries", "dry_run", "enqueue_only"}
    | {each.name for each in fields(DispatchOptions)}
)
GUIDING = tuple(each.name for each in fields(GuideOptions))
# What the backend is called in the records of runs: it was an option of that name once, and their names are digests.
BACKEND_IN_RECORDS = "engine"
# Those of them that may be paths, in every run.
PATHS = ("model", "dataset", "few_shot_file", "adapter", "prompt")


def number(word: str) -> float:
    """A number. Raises ValueError with a sentence."""
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number") from None


def with_escapes(word: str) -> str:
    """A stop string as it is typed in a shell: ``\\n`` and ``\\t`` are a line break and a tab, ``\\\\`` a backslash.

    Before any other letter a backslash is itself.
    """
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t", "\\": "\\"}.get(found[1], found[0]), word)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are decoded."""

    greedy: bool = option(
        False, help="an answer of the most probable tokens; so too without --samples", group="answers"
    )
    samples: int = option(0, help="draw K answers to each question", parse=count, metavar="K", group="answers")
    temperature: float = option(
        1.0,
        help="of the draws; the log-probs that are kept are the model's own anyway",
        parse=number,
        group="answers",
    )
    top_p: float = option(
        1.0, help="draw from the most probable tokens of so much in all", parse=number, group="answers"
    )
    top_k: int = option(0, help="draw from so many tokens (0: from all)", parse=count, metavar="N", group="answers")
    max_new_tokens: int = option(
        64, help="most tokens of an answer, its end token counted", parse=positive_int, metavar="N", group="answers"
    )
    stop: tuple[str, ...] = option(
        (),
        help=r"end an answer before any of these texts (\n is a line break); without it those of the prompt's style",
        parse=with_escapes,
        many=True,
        metavar="TEXT",
        group="answers",
    )
    seed: int = option(0, help="of all draws: answers, examples, order", parse=count, metavar="N", group="answers")
    exact: bool = option(
        False,
        help="one question at a time, so that no answer depends on the batch or the shard that it is in, in any dtype",
        group="answers",
    )
    backend: Backend = option(
        "transformers", help="what computes the answers; vllm where it is installed", choices=BACKENDS, group="answers"
    )


def _no_backend(word: str) -> str:
    """A word for ``--engine`` as it is. Raises UsageError for one that ``--backend`` is to be given."""
    if word in BACKENDS:
        raise UsageError(f"what computes the answers is --backend {word}; --engine is where the jobs run")
    return word


_ENGINE = next(each for each in fields(DispatchOptions) if each.name == "engine")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(WorkOptions, RunsOptions, QuestionOptions, PromptOptions, GuideOptions, AnswerOptions):
    """All that a run of answers can be asked for with. Raises UsageError for what makes no sense."""

    model: str = option(
        help="a Hugging Face id, a folder, or a known name; -8bit or -4bit behind it quantises it",
        metavar="MODEL",
        group="model",
    )
    engine: str = field(default="local", metadata={"option": _ENGINE.metadata["option"]._replace(parse=_no_backend)})
    run_id: str | None = option(
        None,
        help="name of the run (default: of its model, data set and settings, so that the same command goes on with it)",
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
            _refuse_no_text(name, getattr(self, name))
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
        self.decoding()  # refuses numbers that make no sense

    def decoding(self, end_ids: tuple[int, ...] = (), stop: tuple[str, ...] = ()) -> Decoding:
        """How answers are decoded, with what is known of the model: its end tokens, and the style's stop strings, which
        hold where none were given."""
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
        """Questions at once: each has as many sequences as answers."""
        how = self.decoding()
        return 1 if self.exact else max(1, self.batch_size // (how.samples + how.greedy))

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values: dict[str, Any] = plain(self)
        return values

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as far as a command can say it: two commands with the same ask for the same run.

        Paths are absolute. In exact mode the batch has no part in it.
        """
        values = {name: value for name, value in self.to_dict().items() if name not in NEUTRAL}
        for name in PATHS:
            values[name] = settled(name, values[name])
        values[BACKEND_IN_RECORDS] = values.pop("backend")
        values["greedy"] = self.decoding().greedy
        if self.guide is None:  # runs that nothing guides are called as before there were guides
            for name in GUIDING:
                del values[name]
        else:
            guide = self.as_guide(Mode.BERNOULLI)
            values |= {"guide": settled("guide", guide.classifier), "eta": guide.eta, "guide_top_k": guide.top_k}
        if self.exact:
            del values["batch_size"]
        return values

    def name(self) -> str:
        """The run's name: ``run_id``, or one made of the model, the data set and the identity."""
        if self.run_id is not None:
            return self.run_id
        text = json.dumps(self.identity(), sort_keys=True)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
        return f"{_part(self.model)}-{_part(self.dataset)}-{digest}"


def _part(text: str) -> str:
    """The end of a path or an id, as a part of a file name."""
    path = Path(text)
    stem = path.stem if path.suffix.lower() in _FILES else path.name
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", stem.partition(":")[0]).strip("-._")
    return plain[:_LONGEST_PART].rstrip("-._") or "run"


_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".safetensors")


def settled(name: str, value: str | None) -> str | None:
    """A path from here as an absolute one, so that the same file is the same from everywhere; a name as it is, also
    where a file is called so."""
    if value is None or (name == "prompt" and value in STYLES) or (name == "dataset" and value in adapters()):
        return value
    path = Path(value).expanduser()
    if not path.exists():
        return value
    # Of a link its own name: a snapshot of the Hub has links, whose endings say what they are.
    return str(path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name)


def _refuse_no_text(name: str, value: str | None) -> None:
    if value is None:
        return
    if not value or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UsageError(f"--{name.replace('_', '-')} {value!r} is no usable name")
