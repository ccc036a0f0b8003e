"""The options of ``gpuherd simulate``: machines, jobs, external users, and the rules that a run follows.

The command line reads this module at every start, so the modules that parse words are imported with the first word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions, Order, YieldTo
from gpuherd.options import by_spelling, did_you_mean, option, parse, same_option
from gpuherd.units import count, duration_s, positive_int, size_mb

if TYPE_CHECKING:
    from datetime import datetime

    from gpuherd.gpus.turns import TurnRules
    from gpuherd.jobs.attempts.failures import FailureClass
    from gpuherd.jobs.settings import Settings
    from gpuherd.simulate.people import User
    from gpuherd.simulate.workload import Background, Machine, Mix, Recipe, Spread

# From a job's end to the next start on its GPU, as measured (benchmarks/dispatch.py): the poll that finds it clean, the
# lease, the poll under the lease, the start.
TURNAROUND_S = 0.005
# When none of our jobs has run for so long although jobs wait, none of them ever will.
STUCK_AFTER_S = 366 * 86400.0
# Longest attempt: a draw of a heavy-tailed distribution may be absurd, or infinite.
LONGEST_ATTEMPT_S = 10 * 365 * 86400.0
# The guides' loop: time between two polls, time to read the GPUs, pause after a start.
GUIDES_INTERVAL_S = 10.0
GUIDES_READ_S = 0.5
GUIDES_SLEEP_S = 5.0

MOST_VARIANTS = 64


def number(word: str, accepts: Callable[[float], bool], message: str) -> float:
    """The number in the word. Raises ValueError with the message where it is none, or is not accepted.

    >>> number("0.5", lambda value: 0 <= value <= 1, "no share")
    0.5
    """
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise ValueError(message)
    return value


def _parser(name: str, *more: Any, module: str = "workload") -> Callable[[str], Any]:
    """The parser of this name in ``workload``, or in another module here, which is imported with the first word."""

    def parsed(word: str) -> Any:
        return getattr(import_module(f"gpuherd.simulate.{module}"), name)(word, *more)

    return parsed


_spread = _parser("spread")


def job_seconds(word: str) -> Spread | float:
    """How long jobs run: a spread, or ``cost`` (``cost:0.5``) for so many seconds for each unit of a job's own cost.

    >>> job_seconds("cost:0.5")
    0.5
    """
    kind, colon, factor = word.partition(":")
    if kind != "cost":
        found: Spread = _spread(word)
        return found
    return duration_s(factor) if colon else 1.0


def _multiple(word: str) -> float:
    message = f"{word!r}: a job's time limit is a multiple of its length, more than 1; write 1.5"
    return number(word, lambda value: 1 < value < math.inf, message)


def _sigma(word: str) -> float:
    return number(word, lambda value: 0 <= value <= 10, f"{word!r} is not a number from 0 to 10")


def _rate(word: str) -> float:
    return number(word, lambda value: 0 < value <= 1e6, f"{word!r} is no number of starts in a second; write 30")


def _keep_share(word: str) -> float:
    return number(word, lambda value: 0 <= value <= 1, f"{word!r} is not a share from 0 to 1")


# An option of a group; of the first two without a default.
_surroundings = partial(option, None, group="machines")
_workload = partial(option, None, group="workload")
_people = partial(option, None, group="users")
_rule = partial(option, group="rules")
_turns = partial(option, group="turns between users")
_engine = partial(option, group="engine")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of the scenario: machines, external users and jobs."""

    machine: tuple[Machine, ...] | None = _surroundings(
        help="one machine: 8x80GB, or 4x24GB+2x80GB", parse=_parser("machine"), metavar="SPEC"
    )
    machines: tuple[Machine, ...] | None = _surroundings(
        help="a cluster: 125x8x80GB for 125 machines of 8 GPUs; several kinds with commas",
        parse=_parser("machines"),
        metavar="SPEC",
    )
    background: Background | None = _surroundings(
        help="external users: busy=0.3,mean=2h,barge=0.1 for the share of time in which they would use a GPU, the mean "
        "length of a session, and the share of sessions that start on GPUs in use",
        parse=_parser("background"),
        metavar="SPEC",
    )
    begin: datetime | None = _surroundings(
        help='day and time at which the simulation begins, like "Fri 17:00" (default: Mon 00:00)',
        parse=_parser("start_time"),
        metavar="TIME",
    )
    jobs: int | None = _workload(help="number of jobs to draw, in place of SOURCE", parse=positive_int, metavar="N")
    seconds: Spread | float | None = _workload(
        help="how long a job runs: 5m, uniform:1m,10m, exponential:5m (mean), lognormal:5m,1 (median, sigma), "
        "pareto:1m,1.5 (least, exponent), or cost (cost:0.5) to take it from the jobs' own costs",
        parse=job_seconds,
        metavar="SPREAD",
    )
    num_gpus: Mix[int] | None = _workload(
        help="GPUs of a drawn job: 2, or with weights 1:8,4:2 (default: 1)", parse=_parser("mix", count), metavar="N"
    )
    num_nodes: Mix[int] | None = _workload(
        help="nodes of a drawn job, with --num-gpus on each: 1:9,2:1; for --policy handover (default: 1)",
        parse=_parser("mix", positive_int),
        metavar="N",
    )
    mem: Mix[int] | None = _workload(
        help="memory of a drawn job on each GPU: 20GB, or with weights 8GB:3,40GB:1; --share needs it",
        parse=_parser("mix", size_mb),
        metavar="SIZE",
    )
    every: Spread | None = _workload(
        help="time between the arrivals of two jobs: 30s, exponential:30s (default: all jobs arrive at the start)",
        parse=_spread,
        metavar="SPREAD",
    )
    failures: Mapping[FailureClass, float] | None = _workload(
        help="share of attempts that fail, by class: crash=0.02,gpu-fault=0.001",
        parse=_parser("failure_shares"),
        metavar="SHARES",
    )
    retries: int | None = _workload(help="further tries of a drawn job (default: 1)", parse=count, metavar="N")
    guess: float | None = _workload(
        help="error of the lengths that order=longest uses, as the sigma of their logarithm (default: 0, all known)",
        parse=_sigma,
        metavar="SIGMA",
    )
    limits: float | None = _workload(
        help="time limit of each drawn job, as a multiple of its length (default: none, or --timeout for all)",
        parse=_multiple,
        metavar="FACTOR",
    )
    users: tuple[User, ...] | None = _people(
        help="users who share the machine, with weights: alice:2,bob,carol; each has --jobs drawn jobs, or those of "
        "USER=SOURCE",
        parse=_parser("users", module="people"),
        metavar="USERS",
    )
    user_arrives: Mapping[str, float] | None = _people(
        help="when users come, if not at the start: bob=30m,carol=1h",
        parse=_parser("arrivals", module="people"),
        metavar="TIMES",
    )
    user_hours: Mapping[str, float] | None = _people(
        help="GPU-hours that users have used of late, before the start: alice=12,bob=0.5",
        parse=_parser("hours_used", module="people"),
        metavar="HOURS",
    )
    seed: int = option(0, help="seed of all random draws", parse=count, metavar="N", group="workload")

    def recipe(self) -> Recipe | None:
        """How jobs are drawn; None without ``--seconds``."""
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
        """Raises UsageError for options that only drawn jobs use, and for those that need --seconds."""
        for name in ("num_gpus", "mem", "retries", "guess", "limits", "num_nodes"):
            if getattr(self, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is for drawn jobs (--jobs); jobs of SOURCE have their own")
        for name in ("every", "failures"):
            if getattr(self, name) is not None and self.seconds is None:
                raise UsageError(f"--{name} needs --seconds here; give both")


Policy = Literal["gpuherd", "guides", "handover"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a simulated run: those of real runs, with the same names and defaults, and those of the models."""

    policy: Policy = _rule(
        "gpuherd",
        help="our own policy; the polling loop of the guides (one start at a time, 95.5 s each); or the hand-over to "
        "a cluster whose own scheduler decides (first come, first served, with backfilling)",
        choices=POLICIES,
    )
    max_gpus: int | None = same_option(DispatchOptions, "max_gpus")
    max_checks: int | None = same_option(DispatchOptions, "max_checks")
    check_interval: float = same_option(DispatchOptions, "check_interval")
    cpu_jobs: int = _rule(4, help="jobs without a GPU at once", parse=positive_int, metavar="N")
    max_concurrent: int | None = same_option(DispatchOptions, "max_concurrent")
    order: Order = same_option(DispatchOptions, "order")
    share: bool = same_option(DispatchOptions, "share")
    yield_to_others: YieldTo = same_option(DispatchOptions, "yield_to_others")
    timeout: float | None = same_option(DispatchOptions, "timeout")
    quiet_hours: str | None = _rule(
        None, help='hours in which fewer GPUs are used, like "Mon-Fri 09:00-18:00"; see also --begin', metavar="HOURS"
    )
    quiet_max_gpus: int = _rule(0, help="most GPUs to use in quiet hours", parse=count, metavar="N")
    at_most: int = same_option(DispatchOptions, "at_most")
    array_limit: int | None = same_option(DispatchOptions, "array_limit")
    turns: bool = _turns(
        True,
        help="users take turns by their weights; --no-turns: the first to find a GPU free takes it",
        yes_or_no=True,
    )
    half_life: float | None = _turns(
        None, help="after so long GPU time counts half (default: 7d)", parse=duration_s, metavar="TIME"
    )
    grace: float | None = _turns(
        None,
        help="how long a free GPU is kept for the user whose turn it is (default: 30s, and longer than the quiet time "
        "in any case)",
        parse=duration_s,
        metavar="TIME",
    )
    slice: float | None = _turns(
        None,
        help="by so many GPU-seconds a user may be ahead and go on with a GPU that the user's own job has left "
        "(default: 60s)",
        parse=duration_s,
        metavar="TIME",
    )
    keep_share: float | None = _turns(
        None,
        help="for a job that needs more GPUs than are free, those are kept for this share of the time that it has "
        "waited (default: 0.2)",
        parse=_keep_share,
        metavar="SHARE",
    )
    look: float = _engine(
        2.0,
        help="hand-over: time between two polls for ended jobs; other jobs are handed over then",
        parse=duration_s,
        metavar="TIME",
    )
    engine_cycle: float = _engine(
        1.0,
        help="hand-over: shortest time between two passes of the cluster's scheduler over its queue",
        parse=duration_s,
        metavar="TIME",
    )
    engine_rate: float | None = _engine(
        None,
        help="hand-over: jobs that the cluster can start in a second (default: no limit)",
        parse=_rate,
        metavar="N",
    )
    start_up: float = _engine(
        0.5,
        help="hand-over: time from a job's start in the cluster until its own program runs",
        parse=duration_s,
        metavar="TIME",
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
            raise UsageError(f"cpu_jobs={self.cpu_jobs} is not above 0")
        for name in ("look", "engine_cycle", "start_up"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)} is not a length of time above 0")
        if self.at_most < 1 or (self.array_limit is not None and self.array_limit < 1):
            raise UsageError("at_most and array_limit must be above 0")
        if self.quiet_max_gpus < 0:
            raise UsageError(f"quiet_max_gpus={self.quiet_max_gpus} is below 0")
        if self.half_life is not None and self.half_life <= 0:
            raise UsageError(f"half_life={self.half_life} is not a length of time above 0")
        for name in ("grace", "slice"):
            if (getattr(self, name) or 0.0) < 0:
                raise UsageError(f"{name}={getattr(self, name)} is below 0")
        if self.keep_share is not None and not 0 <= self.keep_share <= 1:
            raise UsageError(f"keep_share={self.keep_share} is not a share from 0 to 1")
        self.settings()

    @property
    def names_turns(self) -> bool:
        """Whether any rule of several users is given."""
        given = (self.half_life, self.grace, self.slice, self.keep_share)
        return not self.turns or any(each is not None for each in given)

    def turn_rules(self, quiet_s: float) -> TurnRules | None:
        """The rules of the turns on a machine where a free GPU must be quiet for so long; None without turns."""
        from gpuherd.gpus.turns import RULES, TurnRules

        if not self.turns:
            return None
        return TurnRules(
            half_life_s=RULES.half_life_s if self.half_life is None else self.half_life,
            # One whose turn it is takes the GPU when it has been quiet, and looks at it now and then.
            grace_s=max(RULES.grace_s if self.grace is None else self.grace, 1.5 * quiet_s + 1.0),
            keep_share=RULES.keep_share if self.keep_share is None else self.keep_share,
            quantum_s=RULES.quantum_s,
            slice_s=RULES.slice_s if self.slice is None else self.slice,
        )

    def settings(self) -> Settings:
        """Quiet hours as a settings file would give them. Raises UsageError for hours that don't parse."""
        from gpuherd.jobs.settings import Hours, Settings, parse_quiet_hours

        if self.quiet_hours is None:
            return Settings()
        try:
            return Settings(hours=Hours((parse_quiet_hours(self.quiet_hours),), self.quiet_max_gpus))
        except ValueError as problem:
            raise UsageError(f"quiet_hours: {problem}") from None


@dataclass(frozen=True, slots=True)
class Variant:
    """Rules to compare with others, and their name: ``order=longest share=on``, "" for the only ones."""

    name: str
    rules: Rules


def variants(rules: Rules, words: Sequence[str]) -> tuple[Variant, ...]:
    """Every combination of the values in the words, over these rules. Raises UsageError with the nearest name.

    >>> [each.name for each in variants(Rules(), ["order=age,longest", "max_checks=1,10"])]
    ['order=age max_checks=1', 'order=age max_checks=10', 'order=longest max_checks=1', 'order=longest max_checks=10']
    """
    axes = [_axis(word) for word in words]
    names = [axis[0] for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--compare names {name} twice; write all its values together: {name}=…,…")
    found: list[Variant] = []
    for values in product(*(axis[2] for axis in axes)):
        if len(found) == MOST_VARIANTS:
            raise UsageError(f"--compare: more than {MOST_VARIANTS} combinations; compare fewer at a time")
        name = " ".join(f"{each}={word}" for each, (word, _) in zip(names, values, strict=True))
        given = {axis[1]: value for axis, (_, value) in zip(axes, values, strict=True)}
        found.append(Variant(name, replace(rules, **given)))
    return tuple(found)


def _axis(word: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """An option as the user wrote it, its field, and its values as words and parsed."""
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
