"""The options of ``gpuherd simulate``: machines, jobs, external users, and the rules that a run follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions, Order, YieldTo
from gpuherd.options import by_spelling, did_you_mean, option, parse
from gpuherd.units import count, duration_s, positive_int, size_mb

if TYPE_CHECKING:
    from datetime import datetime

    from gpuherd.jobs.attempts.failures import FailureClass
    from gpuherd.jobs.settings import Settings
    from gpuherd.simulate.cluster import Machine
    from gpuherd.simulate.external_users import Background
    from gpuherd.simulate.workload import Mix, Recipe, Spread


# The options of ``gpuherd simulate``: which machines, which jobs, which strangers. The rules are ``rules.Rules``.
#
# The command line reads this module at every start, so that what takes time to import is imported when a word is
# parsed.


def _machine(word: str) -> tuple[Machine, ...]:
    from gpuherd.simulate.cluster import machine

    return machine(word)


def _machines(word: str) -> tuple[Machine, ...]:
    from gpuherd.simulate.cluster import machines

    return machines(word)


def _background(word: str) -> Background:
    from gpuherd.simulate.external_users import background

    return background(word)


def _begin(word: str) -> datetime:
    from gpuherd.simulate.cluster import begin

    return begin(word)


def _spread(word: str) -> Spread:
    from gpuherd.simulate.workload import spread

    return spread(word)


def job_seconds(word: str) -> Spread | float:
    """How long jobs run: a spread, or ``cost`` (``cost:0.5``) for so many seconds for each unit of a job's own cost.

    >>> job_seconds("cost:0.5")
    0.5
    """
    kind, colon, factor = word.partition(":")
    if kind != "cost":
        return _spread(word)
    return duration_s(factor) if colon else 1.0


def _gpu_mix(word: str) -> Mix[int]:
    from gpuherd.simulate.workload import mix

    return mix(word, count)


def _node_mix(word: str) -> Mix[int]:
    from gpuherd.simulate.workload import mix

    return mix(word, positive_int)


def _memory_mix(word: str) -> Mix[int]:
    from gpuherd.simulate.workload import mix

    return mix(word, size_mb)


def _failures(word: str) -> Mapping[FailureClass, float]:
    from gpuherd.simulate.workload import failure_shares

    return failure_shares(word)


def _multiple(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 1 < value < math.inf:
        raise ValueError(f"{word!r}: a job's time limit is a multiple of its length, more than 1; write 1.5")
    return value


def _sigma(word: str) -> float:
    value = float(word)
    if not 0 <= value <= 10:
        raise ValueError(f"{word!r} is not a number from 0 to 10")
    return value


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is simulated."""

    machine: tuple[Machine, ...] | None = option(
        None, help="one machine: 8x80GB, or 4x24GB+2x80GB", parse=_machine, metavar="SPEC", group="machines"
    )
    machines: tuple[Machine, ...] | None = option(
        None,
        help="a cluster: 125x8x80GB for 125 machines of 8 GPUs; several kinds with commas",
        parse=_machines,
        metavar="SPEC",
        group="machines",
    )
    background: Background | None = option(
        None,
        help="strangers: busy=0.3,mean=2h,barge=0.1 for the share of time in which they would use a GPU, how long they "
        "stay, and the share of them that starts on GPUs in use",
        parse=_background,
        metavar="SPEC",
        group="machines",
    )
    begin: datetime | None = option(
        None,
        help='day and time at which it begins, like "Fri 17:00" (default: Mon 00:00)',
        parse=_begin,
        metavar="TIME",
        group="machines",
    )
    jobs: int | None = option(
        None, help="draw so many jobs, in place of SOURCE", parse=positive_int, metavar="N", group="workload"
    )
    seconds: Spread | float | None = option(
        None,
        help="how long a job runs: 5m, uniform:1m,10m, exponential:5m (mean), lognormal:5m,1 (median, sigma), "
        "pareto:1m,1.5 (least, exponent), or cost (cost:0.5) to take it from the jobs' own costs",
        parse=job_seconds,
        metavar="SPREAD",
        group="workload",
    )
    num_gpus: Mix[int] | None = option(
        None,
        help="GPUs that a drawn job asks for: 2, or with weights 1:8,4:2 (default: 1)",
        parse=_gpu_mix,
        metavar="N",
        group="workload",
    )
    num_nodes: Mix[int] | None = option(
        None,
        help="nodes that a drawn job spans, with --num-gpus on each: 1:9,2:1; for --policy handover (default: 1)",
        parse=_node_mix,
        metavar="N",
        group="workload",
    )
    mem: Mix[int] | None = option(
        None,
        help="memory that a drawn job asks for on each GPU: 20GB, or with weights 8GB:3,40GB:1; what --share goes by",
        parse=_memory_mix,
        metavar="SIZE",
        group="workload",
    )
    every: Spread | None = option(
        None,
        help="time from one job's coming to the next: 30s, exponential:30s (default: all are there from the start)",
        parse=_spread,
        metavar="SPREAD",
        group="workload",
    )
    failures: Mapping[FailureClass, float] | None = option(
        None,
        help="share of attempts that fail, by class: crash=0.02,gpu-fault=0.001",
        parse=_failures,
        metavar="SHARES",
        group="workload",
    )
    retries: int | None = option(
        None, help="further tries of a drawn job (default: 1)", parse=count, metavar="N", group="workload"
    )
    guess: float | None = option(
        None,
        help="error of the lengths that order=longest goes by, as the sigma of their logarithm (default: 0, all known)",
        parse=_sigma,
        metavar="SIGMA",
        group="workload",
    )
    limits: float | None = option(
        None,
        help="time limit of each drawn job, as a multiple of its length (default: none, or --timeout for all)",
        parse=_multiple,
        metavar="FACTOR",
        group="workload",
    )
    seed: int = option(0, help="of all that is drawn by chance", parse=count, metavar="N", group="workload")

    def recipe(self) -> Recipe | None:
        """How jobs are drawn; None when nothing says how long they run."""
        if self.seconds is None:
            return None
        from gpuherd.simulate.workload import Recipe

        plain = Recipe(seconds=self.seconds)
        return Recipe(
            seconds=self.seconds,
            gpus=self.num_gpus or plain.gpus,
            nodes=self.num_nodes or plain.nodes,
            memory_mb=self.mem,
            every=self.every,
            failures=self.failures or {},
            retries=plain.retries if self.retries is None else self.retries,
            guess=self.guess or 0.0,
            limits=self.limits,
        )

    def refuse_for_given_jobs(self) -> None:
        """Raises UsageError for options that only drawn jobs have a use for, and for those that need --seconds."""
        drawn_only = {"num_gpus": "--num-gpus", "mem": "--mem", "retries": "--retries", "guess": "--guess"}
        drawn_only |= {"limits": "--limits", "num_nodes": "--num-nodes"}
        for name, flag in drawn_only.items():
            if getattr(self, name) is not None:
                raise UsageError(f"{flag} is for drawn jobs (--jobs); those of SOURCE say it themselves")
        for name in ("every", "failures"):
            if getattr(self, name) is not None and self.seconds is None:
                raise UsageError(f"--{name} goes with --seconds here; say both")


# The rules that a simulated run follows: what a user can choose on a real run, with the same names and defaults.
#
# ``variants`` makes the rules to compare from words like ``order=age,longest``. Pure.

Policy = Literal["gpuherd", "guides", "handover"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MOST_VARIANTS = 64
_AS_REAL = {each.name: each for each in fields(DispatchOptions)}


def _rate(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e6:
        raise ValueError(f"{word!r} is no number of starts in a second; write 30")
    return value


def _as_real(name: str) -> Any:
    """A field that is declared as the option of real runs is, so that both mean the same."""
    return field(default=_AS_REAL[name].default, metadata=_AS_REAL[name].metadata)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a simulated run goes."""

    policy: Policy = option(
        "gpuherd",
        help="what is simulated: gpuherd; the polling loop of the guides (one start at a time, 95.5 s each); or the "
        "hand-over to a cluster whose own scheduler decides (first come, first served, with backfilling)",
        choices=POLICIES,
        group="rules",
    )
    max_gpus: int | None = _as_real("max_gpus")
    max_checks: int | None = _as_real("max_checks")
    check_interval: float = _as_real("check_interval")
    cpu_jobs: int = option(4, help="jobs without a GPU at once", parse=positive_int, metavar="N", group="rules")
    max_concurrent: int | None = _as_real("max_concurrent")
    order: Order = _as_real("order")  # noqa: RUF009 - it makes a field
    share: bool = _as_real("share")
    yield_to_others: YieldTo = _as_real("yield_to_others")  # noqa: RUF009 - it makes a field
    timeout: float | None = _as_real("timeout")
    quiet_hours: str | None = option(
        None,
        help='hours in which fewer GPUs are used, like "Mon-Fri 09:00-18:00"; see also --begin',
        metavar="HOURS",
        group="rules",
    )
    quiet_max_gpus: int = option(0, help="most GPUs to use in quiet hours", parse=count, metavar="N", group="rules")
    at_most: int = _as_real("at_most")
    array_limit: int | None = _as_real("array_limit")
    look: float = option(
        2.0,
        help="hand-over: time between two looks at what has ended; others are handed over then",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )
    engine_cycle: float = option(
        1.0,
        help="hand-over: the cluster's scheduler goes over its queue at most so often",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )
    engine_rate: float | None = option(
        None,
        help="hand-over: jobs that the cluster can start in a second (default: any number)",
        parse=_rate,
        metavar="N",
        group="engine",
    )
    start_up: float = option(
        0.5,
        help="hand-over: time from a job's start in the cluster until its own program runs",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )

    def __post_init__(self) -> None:
        DispatchOptions(
            max_gpus=self.max_gpus,
            max_checks=self.max_checks,
            check_interval=self.check_interval,
            max_concurrent=self.max_concurrent,
            order=self.order,
            yield_to_others=self.yield_to_others,
            timeout=self.timeout,
        )
        if self.policy not in POLICIES:
            raise UsageError(f"policy={self.policy!r}; possible: {', '.join(POLICIES)}")
        if self.cpu_jobs < 1:
            raise UsageError(f"cpu_jobs={self.cpu_jobs}; the least is 1")
        for name in ("look", "engine_cycle", "start_up"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)}; it is a length of time above 0")
        if self.at_most < 1 or (self.array_limit is not None and self.array_limit < 1):
            raise UsageError("at_most and array_limit are 1 or more")
        if self.quiet_max_gpus < 0:
            raise UsageError(f"quiet_max_gpus={self.quiet_max_gpus}; the least is 0")
        self.settings()

    def settings(self) -> Settings:
        """The rules that a settings file would hold. Raises UsageError for hours that don't parse."""
        from gpuherd.jobs import settings as quiet_hours
        from gpuherd.jobs.settings import Hours, Settings

        if self.quiet_hours is None:
            return Settings()
        try:
            return Settings(hours=Hours((quiet_hours.parse_quiet_hours(self.quiet_hours),), self.quiet_max_gpus))
        except ValueError as problem:
            raise UsageError(f"quiet_hours: {problem}") from None


@dataclass(frozen=True, slots=True)
class Variant:
    """Rules to compare with others, and what tells them apart: ``order=longest share=on``, "" for the only ones."""

    name: str
    rules: Rules


def variants(rules: Rules, words: Sequence[str]) -> tuple[Variant, ...]:
    """Every combination of the values that the words name, over these rules. Raises UsageError with the nearest name.

    >>> [each.name for each in variants(Rules(), ["order=age,longest", "max_checks=1,10"])]
    ['order=age max_checks=1', 'order=age max_checks=10', 'order=longest max_checks=1', 'order=longest max_checks=10']
    """
    axes = [_axis(word) for word in words]
    names = [axis[0] for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--compare names {name} twice; write all its values in one word: {name}=…,…")
    found: list[Variant] = []
    for values in product(*(axis[2] for axis in axes)):
        # A word may stand for more than one value of one option only; more combinations than this nobody can read.
        if len(found) == MOST_VARIANTS:
            raise UsageError(f"--compare: more than {MOST_VARIANTS} combinations; compare fewer at a time")
        name = " ".join(f"{each}={word}" for each, (word, _) in zip(names, values, strict=True))
        given = {axis[1]: value for axis, (_, value) in zip(axes, values, strict=True)}
        found.append(Variant(name, replace(rules, **given)))
    return tuple(found)


def _axis(word: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """An option as the user wrote it, the field it is, and its values as words and parsed."""
    name, equals, rest = word.partition("=")
    name = name.strip()
    known = by_spelling(Rules)
    if name.replace("-", "_") not in known or not equals:
        rules = sorted({declared.name for declared, _ in known.values()})
        hint = did_you_mean(name, known, f"there are {', '.join(rules)}", show="{}=".format)
        raise UsageError(f"--compare {word!r} names no rule{hint}")
    declared, spec = known[name.replace("-", "_")]
    try:
        return name, declared.name, [(part.strip(), parse(spec, part.strip())) for part in rest.split(",")]
    except ValueError as problem:
        raise UsageError(f"--compare {word!r}: {problem}") from None
