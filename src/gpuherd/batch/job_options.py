"""What people can say of a job, in ``#gpuherd`` lines, jobs.yaml and flags of ``gpuherd submit``; jobs as drafts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, UsageError, one_line, printable
from gpuherd.jobs.job import Job
from gpuherd.options import Option, did_you_mean, option, option_fields, parse
from gpuherd.units import count, duration_s, gpu_range, size_mb

# A command as a job file asks for it, before it is a job; and what can be wrong with such a file.
#
# Plain data. The readers (``commands``, ``document``) make drafts, ``assemble`` makes jobs of them.

MOST_JOBS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A command and what its file says of it.

    Attributes:
        line: where it stands in the file, counted from 1.
        argv: the command as an argument list.
        said: settings by field name of ``JobOptions``; what is not in it was not said.
        proposed: a neutral name for it if it has none of its own; it never tells the command.
        group: a name that stands for all jobs which the same entry of the file made; ``needs`` may use it.
    """

    line: int
    argv: tuple[str, ...]
    said: Mapping[str, Any] = field(default_factory=dict)
    proposed: str
    group: str | None = None


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """Something wrong in a job file: the line (0 where no single line is at fault) and a sentence."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {one_line(self.text)}" if self.line else one_line(self.text)


class BadJobFile(GpuherdError):
    """A job file can't be used. ``problems`` are all that was found, in order; nothing has been started."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, problems: Sequence[Problem], source: str = ""):
        self.problems = tuple(sorted(problems))
        self.source = source
        more = len(self.problems) - 1
        where = f"{source}: " if source else ""
        super().__init__(f"{where}{self.problems[0]}" + (f" (and {more} more)" if more else ""))

    def lines(self) -> list[str]:
        """Each problem as one printable line, with the file's name in front."""
        where = f"{printable(self.source)}: " if self.source else ""
        return [f"{where}{problem}" for problem in self.problems]

    def of(self, source: str) -> BadJobFile:
        """The same with the name of the file."""
        return BadJobFile(self.problems, source)


# A job that says which model it loads, in place of how many GPUs it needs: what it says, and what comes of it.
#
# Plain data. Who plans is no business of this room, which knows no models: it is given a ``Planner``.


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUse:
    """What a job says of the model that it loads; None is what was not said. The words are the planner's to judge.

    Attributes:
        model: a known name, a Hugging Face id, a folder or a file.
        dtype: how the weights lie in memory.
        batch, prompt_tokens, new_tokens: sequences at once, and how long they are.
        parallel: how it goes over several GPUs.
        gpus: at least and at most so many GPUs.
        memory_mb: what it asks to be free on each, whatever the plan needs.
    """

    model: str
    dtype: str | None = None
    batch: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    parallel: str | None = None
    gpus: tuple[int, int] | None = None
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What such a job asks for: GPUs, and MB free on each. ``family`` is one name for all jobs of which the same is
    said; ``sentence`` tells people."""

    gpus: int
    memory_mb: int
    family: str
    sentence: str


# Raises a GpuherdError for a model that is not to be had, or that fits nowhere.
Planner = Callable[[ModelUse], Need]


# What people can say of a job, once for all: ``#gpuherd`` lines, jobs.yaml, and the flags of ``gpuherd submit``.
#
# Knows names, spellings and values. Does not know files, commands or queues.

LONGEST_NAME = 200
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def job_name(word: str) -> str:
    """A job's name: printable, without blanks and commas, so that ``needs=a,b`` can list names, and no flag."""
    if not word or len(word) > LONGEST_NAME or not word.isprintable() or "," in word or " " in word:
        raise ValueError(f"{word!r} is no name; write up to {LONGEST_NAME} letters, without blanks and commas")
    if word.startswith("-"):
        raise ValueError(f"{word!r} is no name: one that begins with - would be taken for a flag")
    return word


def job_names(word: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(job_name(name.strip()) for name in word.split(","))


def whole_number(word: str) -> int:
    """A whole number, negative ones too."""
    if not re.fullmatch(r"[+-]?\d{1,9}", word, re.ASCII):
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def number_from_1(word: str) -> int:
    """A whole number above 0."""
    if not re.fullmatch(r"\d{1,9}", word, re.ASCII) or int(word) < 1:
        raise ValueError(f"{word!r} is not a whole number above 0")
    return int(word)


def model_name(word: str) -> str:
    """A model's name or path."""
    if not word or not word.isprintable():
        raise ValueError(f"{word!r} is no model; write a known name, a Hugging Face id or a path")
    return word


def amount(word: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{word!r} is not a number of 0 or more")
    return value


def path_name(word: str) -> str:
    """A path that a system call can take."""
    if not word or "\0" in word:
        raise ValueError(f"{word!r} is no path")
    return word


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What was said of a job. None (and False, and ()) is what was not said."""

    num_gpus: tuple[int, int] | None = option(
        None,
        help="GPUs that the job gets (default: 1); 1-4: more of them after it ran out of memory",
        parse=gpu_range,
        metavar="N",
        group="job",
    )
    mem: int | None = option(
        None, help="free memory that it needs on each GPU, like 20GB", parse=size_mb, metavar="SIZE", group="job"
    )
    nodes: int | None = option(
        None,
        help="machines of a cluster that it spans, with as many GPUs on each (default: 1)",
        parse=number_from_1,
        metavar="N",
        group="job",
    )
    cpus: int | None = option(
        None,
        help="CPU cores that it gets on each node; on this machine the threads that numeric libraries are told",
        parse=number_from_1,
        metavar="N",
        group="job",
    )
    host_mem: int | None = option(
        None,
        help="main memory that it gets on each node, like 64GB; on this machine it has to be there",
        parse=size_mb,
        metavar="SIZE",
        group="job",
    )
    share: bool = option(False, help="it may share its GPU with others that say so and how much --mem", group="job")
    priority: int | None = option(
        None, help="higher goes first (default: 0)", parse=whole_number, metavar="N", group="job"
    )
    name: str | None = option(
        None, help="what it is called (default: a number)", parse=job_name, metavar="NAME", group="job"
    )
    needs: tuple[str, ...] = option(
        (), help="jobs that must have succeeded before, like a,b", parse=job_names, metavar="NAMES", group="job"
    )
    timeout: float | None = option(
        None, help="stop it after this time, like 90s or 2h", parse=duration_s, metavar="TIME", group="job"
    )
    stage_timeout: float | None = option(
        None, help="stop it when one stage of its progress takes longer", parse=duration_s, metavar="TIME", group="job"
    )
    heartbeat: float | None = option(
        None, help="stop it when it tells no progress for so long", parse=duration_s, metavar="TIME", group="job"
    )
    retries: int | None = option(
        None, help="further tries after a failure that may pass (default: 1)", parse=count, metavar="N", group="job"
    )
    round: int | None = option(
        None,
        help="it waits until all jobs of lower rounds have ended (default: 0)",
        parse=count,
        metavar="N",
        group="job",
    )
    cost: float | None = option(
        None,
        help="how long it is expected to take, in any unit; see --order longest",
        parse=amount,
        metavar="X",
        group="job",
    )
    family: str | None = option(
        None, help="jobs of one family are expected to use as much memory", parse=job_name, metavar="NAME", group="job"
    )
    cwd: str | None = option(
        None, help="folder that it runs in (default: this one)", parse=path_name, metavar="DIR", group="job"
    )
    result: str | None = option(
        None, help="a file that is there when it has succeeded", parse=path_name, metavar="FILE", group="job"
    )
    model: str | None = option(
        None,
        help="the model that it loads: its memory plan says how many GPUs and how much memory the job gets",
        parse=model_name,
        metavar="MODEL",
        group="model",
    )
    dtype: str | None = option(
        None,
        help="how the weights lie in memory: fp32, bf16, fp16, int8, nf4, nf4-dq (default: as the checkpoint has them)",
        metavar="DTYPE",
        group="model",
    )
    batch: int | None = option(
        None, help="sequences at once (default: 1)", parse=number_from_1, metavar="B", group="model"
    )
    prompt_tokens: int | None = option(
        None, help="tokens of a prompt, at most (default: 512)", parse=number_from_1, metavar="P", group="model"
    )
    new_tokens: int | None = option(
        None, help="tokens of an answer, at most (default: 64)", parse=number_from_1, metavar="N", group="model"
    )
    parallel: str | None = option(
        None,
        help="over several GPUs: auto (as few as hold it), layers, tensor, or replica (one GPU)",
        metavar="HOW",
        group="model",
    )
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def use(self) -> ModelUse | None:
        """What was said of a model, None when it was nothing. Raises UsageError for words that need a model."""
        said = {name: getattr(self, name) for name in OF_A_MODEL}
        if self.model is not None:
            return ModelUse(model=self.model, gpus=self.num_gpus, memory_mb=self.mem, **said)
        for name, value in said.items():
            if value is not None:
                raise UsageError(f"{name.replace('_', '-')} is said of a model, and no model is named")
        return None

    def without_model(self) -> JobOptions:
        """The same options without those that describe a model."""
        return replace(self, model=None, dtype=None, batch=None, prompt_tokens=None, new_tokens=None, parallel=None)

    def job(
        self,
        name: str,
        argv: tuple[str, ...],
        *,
        gpus: int = 1,
        retries: int = 1,
        planner: Planner | None = None,
    ) -> Job:
        """The job of this name and command; ``gpus`` and ``retries`` where nothing is said of them.

        Of a job that names a model ``planner`` says the GPUs and the memory; memory that was said counts, and so does a
        range of GPUs. Raises UsageError for settings that don't go together, and what the planner raises.
        """
        least, most = self.num_gpus if self.num_gpus is not None else (gpus, gpus)
        memory_mb, family = self.mem, self.family
        use = self.use
        if use is not None:
            if planner is None:
                raise UsageError(f"job {name!r} names a model, and nobody here can plan it")
            need = planner(use)
            least, most = need.gpus, most if self.num_gpus is not None else need.gpus
            memory_mb = need.memory_mb if memory_mb is None else memory_mb
            family = need.family if family is None else family
        return Job(
            name=name,
            argv=argv,
            gpus=least,
            nodes=self.nodes or 1,
            cpus=self.cpus,
            host_memory_mb=self.host_mem,
            gpus_at_most=most if most > least else None,
            memory_mb=memory_mb,
            share=self.share,
            priority=self.priority or 0,
            needs=self.needs,
            round=self.round or 0,
            cost=self.cost,
            family=family,
            retries=retries if self.retries is None else self.retries,
            timeout_s=self.timeout,
            stage_timeout_s=self.stage_timeout,
            heartbeat_s=self.heartbeat,
            env=self.env,
            cwd=self.cwd,
            result=self.result,
        )


# What is said of a model beside its name.
OF_A_MODEL = ("dtype", "batch", "prompt_tokens", "new_tokens", "parallel")
_OPTIONS: dict[str, Option] = {declared.name: spec for declared, spec in option_fields(JobOptions)}
# In a file nothing else is called so, as it is on the command line, where --gpus says which.
_SHORT = {"gpus": "num_gpus"}
KEYS = ("gpus", *(name.replace("_", "-") for name in _OPTIONS if name != "num_gpus"), "env.NAME")


def field_of(key: str) -> str:
    """The field of ``JobOptions`` that a key of a file means. Raises ValueError, naming the nearest, if none."""
    name = key.replace("-", "_")
    name = _SHORT.get(name, name)
    if name not in _OPTIONS:
        raise ValueError(unknown(key, KEYS))
    return name


def value_of(name: str, word: str) -> Any:
    """The value that a word means for this field. Raises ValueError with a sentence."""
    return parse(_OPTIONS[name], word)


def variable(name: str, value: str) -> str:
    """The name, when a job may have it in its environment. Raises ValueError, when not or when the value can't be."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an environment variable")
    if name in _OURS:
        raise ValueError(f"{name} is set by gpuherd when it knows the job's GPUs; choose GPUs by --gpu-list")
    if name.startswith("GPUHERD_"):
        raise ValueError(f"{name} is gpuherd's own; a job can't set it")
    if "\0" in value:
        raise ValueError(f"the value of {name} has a NUL byte in it")
    return name


def unknown(word: str, known: tuple[str, ...]) -> str:
    """A sentence about a word that is not among the known ones, with the nearest."""
    hint = did_you_mean(word.replace("_", "-"), known, f"possible: {', '.join(known)}", cutoff=0.5)
    return f"unknown key {word!r}{hint}"


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both settings; where both say something the later counts, but for ``env``, which is joined.

    >>> merged({"mem": 1, "env": {"A": "1"}}, {"mem": 2, "env": {"B": "2"}})
    {'mem': 2, 'env': {'A': '1', 'B': '2'}}
    """
    both = {**earlier, **later}
    if "env" in earlier and "env" in later:
        both["env"] = {**earlier["env"], **later["env"]}
    return both
