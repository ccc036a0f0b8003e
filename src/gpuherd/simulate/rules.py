"""The rules that a simulated run follows: what a user can choose on a real run, with the same names and defaults.

``variants`` makes the rules to compare from words like ``order=age,longest``. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.flags import option_fields, spellings
from gpuherd.jobs.options import DispatchOptions, Order, YieldTo, count, positive_int
from gpuherd.options import option
from gpuherd.quantities import duration_s

if TYPE_CHECKING:
    from gpuherd.jobs.settings import Settings

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
        from gpuherd.jobs import quiet_hours
        from gpuherd.jobs.settings import Hours, Settings

        if self.quiet_hours is None:
            return Settings()
        try:
            return Settings(hours=Hours((quiet_hours.parse(self.quiet_hours),), self.quiet_max_gpus))
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
    known: dict[str, str] = {}
    for declared, spec in option_fields(Rules):
        shown, quiet = spellings(declared.name, spec)
        known |= dict.fromkeys((flag[2:] for flag in (*shown, *quiet)), declared.name)
    if name not in known or not equals:
        nearest = difflib.get_close_matches(name, [each for each in known if "-" not in each], n=1)
        hint = f"; did you mean {nearest[0]}=?" if nearest else f"; there are {', '.join(sorted(set(known.values())))}"
        raise UsageError(f"--compare {word!r} names no rule{hint}")
    words = [part.strip() for part in rest.split(",")]
    return name, known[name], [(part, _value(known[name], part, word)) for part in words]


def _value(name: str, word: str, whole: str) -> Any:
    spec = next(spec for declared, spec in option_fields(Rules) if declared.name == name)
    if name == "share":
        switch = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
        if word.lower() not in switch:
            raise UsageError(f"--compare {whole!r}: {word!r} is neither on nor off")
        return switch[word.lower()]
    if spec.choices is not None and word not in spec.choices:
        nearest = difflib.get_close_matches(word, spec.choices, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else f"; possible: {', '.join(spec.choices)}"
        raise UsageError(f"--compare {whole!r}: there is no {word!r}{hint}")
    try:
        return word if spec.parse is None else spec.parse(word)
    except ValueError as problem:
        raise UsageError(f"--compare {whole!r}: {problem}") from None
