"""The settings files: the user's ``~/.config/gpuherd/config.toml``, the machine's policy, and quiet hours in both.

The user's file gives defaults for options that the command line leaves open, limits that the user sets themself, and
where notices go. The machine's policy (``gpuherd.gpus.policy_file`` decides whether it counts) sets limits that no user
can loosen. The parser of the option checks each key; an error names file and key. Knows no GPUs:
``gpuherd.jobs.scheduler.limits`` computes what the limits allow at a given time. All keys: docs/sharing-politely.md.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError
from gpuherd.options import Option, WrongType, by_spelling, did_you_mean, option_fields, parse_value
from gpuherd.units import amount, count, duration_s, gpu_names, positive_int

if TYPE_CHECKING:
    from argparse import Namespace

    # Loaded when they are used: ``gpuherd submit`` needs nothing of GPUs.
    from gpuherd.gpus.reservations import ReservationLimits, ReservationRules
    from gpuherd.gpus.turns import TurnRules

IDLE_LEASE_S = 4 * 3600.0
# A shorter time would break leases of jobs that load their data.
_SHORTEST_IDLE_LEASE_S = 60.0
# A shorter time would end reservations whose owner's job still waits for a GPU to be quiet.
_SHORTEST_LAPSE_S = 60.0


def user_file() -> Path:
    """Where the user's settings are looked for: under XDG_CONFIG_HOME, else ~/.config.

    Raises RuntimeError for a user without a home folder.
    """
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "gpuherd" / "config.toml"


def user_cache(kind: str) -> Path:
    """The folder, which need not exist yet, for files that can be made again: under XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    # expanduser of a user without a home leaves the ~, where Path's would raise.
    return Path(os.path.expanduser(base or "~/.cache")) / "gpuherd" / kind  # noqa: PTH111


# --- quiet hours --------------------------------------------------------------------------------------------------
#
# ``Mon-Fri 09:00-18:00``: times in which gpuherd uses few GPUs. Times are local, to the minute. A window that ends at
# or before its start extends into the next day, and belongs to the day on which it begins: ``Fri 22:00-06:00`` ends on
# Saturday morning.

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FORM = re.compile(
    r"(?:(?P<days>[A-Za-z]+(?:\s*[-,]\s*[A-Za-z]+)*)\s*)?(?:(?P<from>\d{1,2}:\d\d)\s*-\s*(?P<to>\d{1,2}:\d\d))?",
    re.ASCII,
)
_EXAMPLES = 'write "Mon-Fri 09:00-18:00", "22:00-06:00" or "Sat,Sun"'
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A window: days on which it begins (0 is Monday), minutes after midnight from and to, and how it was written."""

    days: frozenset[int]
    start: int
    end: int
    text: str

    def windows(self, around: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Each window from the day before ``around`` to eight days after it: begin, and end (outside it)."""
        midnight = around.replace(hour=0, minute=0, second=0, microsecond=0)
        length = self.end - self.start if self.end > self.start else self.end + _DAY_MINUTES - self.start
        for day in range(-1, 9):
            date = midnight + timedelta(days=day)
            if date.weekday() in self.days:
                begin = date + timedelta(minutes=self.start)
                yield begin, begin + timedelta(minutes=length)


def parse_quiet_hours(word: str) -> QuietHours:
    """Quiet hours from text. Raises ValueError with a sentence.

    >>> hours = parse_quiet_hours("Mon-Fri 09:00-18:00")
    >>> sorted(hours.days), hours.start, hours.end
    ([0, 1, 2, 3, 4], 540, 1080)
    """
    text = " ".join(word.split())
    found = _FORM.fullmatch(text)
    if not text or found is None:
        raise ValueError(f"{word!r} is no quiet hours; {_EXAMPLES}")
    days = frozenset(range(7)) if found["days"] is None else _days(found["days"], word)
    start, end = _minutes(found["from"] or "00:00", word), _minutes(found["to"] or "24:00", word)
    if start in (end, _DAY_MINUTES):
        raise ValueError(f"{word!r}: the hours end when they begin; {_EXAMPLES}")
    return QuietHours(days, start, end, text)


def _days(text: str, word: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.split(","):
        ends = [_day(name, word) for name in part.split("-")]
        if len(ends) > 2:
            raise ValueError(f"{word!r}: {part.strip()!r} is no range of days; {_EXAMPLES}")
        first, last = ends[0], ends[-1]
        days |= {(first + step) % 7 for step in range((last - first) % 7 + 1)}
    return frozenset(days)


def _day(name: str, word: str) -> int:
    short = name.strip().lower()
    matches = [number for number, day in enumerate(_DAYS) if len(short) >= 2 and day.startswith(short)]
    if len(matches) != 1:
        raise ValueError(f"{word!r}: {name.strip()!r} is no day of the week; {_EXAMPLES}")
    return matches[0]


def _minutes(clock: str, word: str) -> int:
    hours, minutes = map(int, clock.split(":"))
    total = hours * 60 + minutes
    if minutes > 59 or total > _DAY_MINUTES:
        raise ValueError(f"{word!r}: {clock} is no time of day; {_EXAMPLES}")
    return total


def active(hours: Sequence[QuietHours], local: datetime) -> QuietHours | None:
    """The first of these that includes this local time (without a time zone), or None."""
    for each in hours:
        if any(begin <= local < end for begin, end in each.windows(local)):
            return each
    return None


def over_at(hours: Sequence[QuietHours], local: datetime) -> datetime | None:
    """The end of the quiet time around ``local``, across windows that meet; None if it doesn't end within a week.

    ``local`` itself when it is not quiet.
    """
    at = local
    while at - local < timedelta(days=7):
        ends = [end for each in hours for begin, end in each.windows(at) if begin <= at < end]
        if not ends:
            return at
        at = max(ends)
    return None


def next_change(hours: Sequence[QuietHours], local: datetime) -> datetime | None:
    """The next local time at which any of these begins or ends; None without any."""
    times = (time for each in hours for window in each.windows(local) for time in window)
    return min((time for time in times if time > local), default=None)


# --- the settings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hours:
    """Quiet hours, and how many GPUs gpuherd may use then."""

    quiet: tuple[QuietHours, ...] = ()
    max_gpus: int = 0


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """Turns between users, as the machine's administrator sets them.

    Attributes:
        enabled: False where whoever is faster takes a GPU.
        own_rules: the constants of ``gpuherd.gpus.turns``; None for the usual ones.
        weights: of users by name; 1 for all others.
    """

    enabled: bool = True
    own_rules: TurnRules | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def rules(self) -> TurnRules:
        """The constants that count."""
        from gpuherd.gpus.turns import RULES

        return self.own_rules or RULES

    def weight(self, user: str) -> float:
        """The user's weight: with twice the weight a user gets twice the share."""
        return self.weights.get(user, 1.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits that the machine's administrator sets. ``exclude_gpus``: indices, labels like 3:1, or UUIDs."""

    max_gpus_per_user: int | None = None
    max_gpus_of: Mapping[str, int] = field(default_factory=dict)
    hours: Hours = Hours()
    exclude_gpus: tuple[str, ...] = ()
    idle_lease_s: float = IDLE_LEASE_S
    turns: TurnPolicy = TurnPolicy()
    week_hours_per_user: float | None = None
    week_hours_of: Mapping[str, float] = field(default_factory=dict)
    reservations: ReservationRules | None = None
    idle_after_s: float | None = None
    path: Path | None = None

    def week_hours(self, user: str) -> float | None:
        """The GPU-hours that this user may use in a week; None for as many as there are."""
        return self.week_hours_of.get(user, self.week_hours_per_user)

    def max_gpus(self, user: str) -> int | None:
        """The most GPUs that this user may hold on the machine; None for as many as there are."""
        return self.max_gpus_of.get(user, self.max_gpus_per_user)

    @property
    def reservation_rules(self) -> ReservationRules:
        """The rules of reservations: the usual ones where the policy has none."""
        from gpuherd.gpus.reservations import RULES

        return RULES if self.reservations is None else self.reservations

    def reservation_limits(self, user: str) -> ReservationLimits:
        """The most that this user may reserve: no more GPUs than they may hold."""
        limits = self.reservation_rules.of(user)
        known = [most for most in (limits.max_gpus, self.max_gpus(user)) if most is not None]
        return replace(limits, max_gpus=min(known, default=None))


@dataclass(frozen=True, slots=True)
class Settings:
    """The content of both files. ``defaults``: values of ``DispatchOptions`` by field. ``warnings``: for the user."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_gpus: int | None = None
    hours: Hours = Hours()
    policy: Policy = Policy()
    warnings: tuple[str, ...] = ()
    path: Path | None = None
    own_idle_after_s: float | None = None

    def fill(self, args: Namespace, config_type: type) -> None:
        """Puts defaults where the command line (``gpuherd.options``) leaves an option of this dataclass open.

        It leaves out options of engines other than the chosen one: a partition in the file doesn't prevent
        ``--engine local``.
        """
        from gpuherd.jobs.options import foreign

        names = [declared.name for declared, _ in option_fields(config_type)]
        if "engine" in names and not hasattr(args, "engine"):
            args.engine = self.engine
        strange = foreign(getattr(args, "engine", LOCAL))
        for name in names:
            if name in self.defaults and name not in strange and not hasattr(args, name):
                setattr(args, name, self.defaults[name])

    @property
    def idle_after_s(self) -> float:
        """After so many seconds a GPU that is held without being used is shown as idle: the user's own setting comes
        before the machine's."""
        from gpuherd.gpus.idle_held import IDLE_AFTER_S  # here: few commands show GPUs

        return self.own_idle_after_s or self.policy.idle_after_s or IDLE_AFTER_S

    @property
    def engine(self) -> str:
        """The engine that runs jobs unless the command line names another."""
        name: str = self.defaults.get("engine", LOCAL)
        return name


NO_SETTINGS = Settings()


def load() -> Settings:
    """Both files as they are now; a missing file sets nothing.

    Raises:
        UsageError: a file is wrong, or another user could have written the user's one. It names file, key and remedy.
    """
    from gpuherd.gpus.policy_file import parse, read_policy  # only where there is a file to read

    machine = read_policy()
    policy = Policy() if machine.path is None else _policy(machine.tables, machine.path)
    warnings = () if machine.warning is None else (machine.warning,)
    try:
        path = user_file()
        text = _own_text(path)
    except RuntimeError:  # a user without a home folder has no settings in it
        return Settings(policy=policy, warnings=warnings)
    if text is None:
        return Settings(policy=policy, warnings=warnings)
    top = _Table(parse(text, path, "you"), path, "", ("defaults", "limits", "notify", "idle"))
    limits = top.table("limits", ("max_gpus", "quiet_hours", "quiet_max_gpus"))
    notify = top.table("notify", ("command", "webhook"))
    idle = top.table("idle", ("after",))
    defaults = _defaults(top.table("defaults", None))
    notices = {"notify_command": notify.get("command"), "webhook": notify.get("webhook")}
    return Settings(
        defaults=defaults | {name: value for name, value in notices.items() if value is not None},
        max_gpus=limits.get("max_gpus", positive_int),
        hours=_hours(limits),
        policy=policy,
        warnings=warnings,
        path=path,
        own_idle_after_s=idle.get("after", duration_s),
    )


def _own_text(path: Path) -> str | None:
    """The user's file; None when there is none. It may name a command to run, so no other user may write it."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise UsageError(f"{path} is no plain file; remove it")
            if state.st_uid not in (0, os.geteuid()) or _others_can_write(state):
                raise UsageError(f"{path} could have been written by somebody else; run: chmod go-w {path}, and own it")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeError:
        raise UsageError(f"{path} is no UTF-8 text; save it in UTF-8") from None
    except OSError as problem:
        raise UsageError(f"{path} can't be read: {problem.strerror}") from None


def _others_can_write(state: os.stat_result) -> bool:
    """Whether the file's mode lets users other than its owner write it.

    With umask 002 each user has a group of the same name without other members; writing by that group is allowed.
    """
    if state.st_mode & stat.S_IWOTH or not state.st_mode & stat.S_IWGRP:
        return bool(state.st_mode & stat.S_IWOTH)
    try:
        user, group = pwd.getpwuid(state.st_uid).pw_name, grp.getgrgid(state.st_gid)
    except KeyError:
        return True
    return group.gr_name != user or bool(set(group.gr_mem) - {user})


# --- tables -------------------------------------------------------------------------------------------------------


class _Table:
    """A table of a settings file; its errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: Path, name: str, known: Collection[str] | None) -> None:
        self.values, self.path, self.name = values, path, name
        if known is not None:
            for key in values:
                self.check_key(key, key, known)

    def check_key(self, key: str, name: str, known: Collection[str]) -> None:
        """Raises UsageError when the key, read as ``name``, is none of the known ones."""
        if name not in known:
            hint = did_you_mean(name, known, f"there are {', '.join(known)}", cutoff=0.5)
            raise self.wrong(key, f"is no setting{hint}")

    def wrong(self, key: str, what: str) -> UsageError:
        place = f"[{self.name}] {key}" if self.name else key
        return UsageError(f"{self.path}: {place} {what}")

    def table(self, key: str, known: Collection[str] | None) -> _Table:
        """The table of this name, empty when it is missing. ``known``: its possible keys, None for any."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, f"should be a table; write [{key}] and its settings below it")
        return _Table(value, self.path, f"{self.name}.{key}" if self.name else key, known)

    def get(self, key: str, parse: Callable[[str], Any] | None = None, *, many: bool = False) -> Any:
        """A value, a text where it has no parser; () for no ``many``, else None when it is missing."""
        if key not in self.values:
            return () if many else None
        return self.value(key, Option(help="", parse=parse, many=many))

    def value(self, key: str, spec: Option) -> Any:
        """The value of an option."""
        value = self.values[key]
        is_text = spec.parse is None and spec.choices is None and not spec.is_switch and not spec.many
        if is_text and (not isinstance(value, str) or not value.strip()):
            raise self.wrong(key, f"= {value!r} should be a text in quotes")
        try:
            return parse_value(spec, value)
        except WrongType as problem:
            raise self.wrong(key, f"= {problem}") from None
        except ValueError as problem:
            raise self.wrong(key, f"is wrong: {problem}") from None


# Further tables of the machine's policy.
_TABLES = ("turns", "reservations", "idle")
_USER_KEYS = ("max_gpus", "weight", "gpu_hours_per_week", "reservations")
_RESERVATION_LIMITS = ("max_gpus", "max_hours", "max_ahead")
_RESERVATIONS = (*_RESERVATION_LIMITS, "lapse_after", "unknown_horizon", "enabled")


def _policy(tables: Mapping[str, Any], path: Path) -> Policy:
    top = _Table(tables, path, "", ("limits", "users", "exclude_gpus", "idle_lease", "lease_dir", *_TABLES))
    limits = top.table("limits", ("max_gpus_per_user", "gpu_hours_per_week_per_user", "quiet_hours", "quiet_max_gpus"))
    users = top.table("users", None)
    user_tables = {name: users.table(name, _USER_KEYS) for name in users.values}
    excluded = top.get("exclude_gpus", gpu_names, many=True)
    idle_lease = top.get("idle_lease", duration_s)
    if idle_lease is not None and idle_lease < _SHORTEST_IDLE_LEASE_S:
        raise top.wrong("idle_lease", f"is below {_SHORTEST_IDLE_LEASE_S:g} s, in which a job may load its data")
    lease_dir = top.get("lease_dir")
    if lease_dir is not None and not Path(lease_dir).is_absolute():
        raise top.wrong("lease_dir", f"= {lease_dir!r} should be the whole path of a folder, from / on")
    return Policy(
        max_gpus_per_user=limits.get("max_gpus_per_user", count),
        max_gpus_of=_by_user(user_tables, "max_gpus", count),
        hours=_hours(limits),
        exclude_gpus=tuple(name for names in excluded for name in names.split(",")),
        idle_lease_s=IDLE_LEASE_S if idle_lease is None else idle_lease,
        turns=_turns(top, user_tables),
        week_hours_per_user=limits.get("gpu_hours_per_week_per_user", amount),
        week_hours_of=_by_user(user_tables, "gpu_hours_per_week", amount),
        reservations=_reservations(top.table("reservations", _RESERVATIONS), user_tables),
        idle_after_s=top.table("idle", ("after",)).get("after", duration_s),
        path=path,
    )


def _by_user(tables: Mapping[str, _Table], key: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """A key of all users who have it, by name."""
    values = {name: table.get(key, parse) for name, table in tables.items()}
    return {name: value for name, value in values.items() if value is not None}


def _is_enabled(table: _Table) -> bool:
    return "enabled" not in table.values or bool(table.value("enabled", Option(help="", is_switch=True)))


def _turns(top: _Table, users: Mapping[str, _Table]) -> TurnPolicy:
    from gpuherd.gpus.turns import RULES

    table = top.table("turns", ("enabled", "half_life", "grace", "slice", "keep_share"))
    enabled = _is_enabled(table)
    keep_share, time_slice = table.get("keep_share", amount), table.get("slice", duration_s)
    if keep_share is not None and keep_share > 1:
        raise table.wrong("keep_share", "is above 1, the whole of the waiting time")
    weights = _by_user(users, "weight", amount)
    for name, weight in weights.items():
        if weight <= 0:
            raise users[name].wrong("weight", "should be above 0; a user with max_gpus = 0 gets no GPUs")
    given = {
        "half_life_s": table.get("half_life", duration_s),
        "grace_s": table.get("grace", duration_s),
        "slice_s": time_slice,
        "quantum_s": None if time_slice is None else time_slice * RULES.quantum_s / RULES.slice_s,
        "keep_share": keep_share,
    }
    rules = replace(RULES, **{name: value for name, value in given.items() if value is not None})
    return TurnPolicy(enabled=enabled, own_rules=None if rules == RULES else rules, weights=weights)


def _reservations(table: _Table, users: Mapping[str, _Table]) -> ReservationRules:
    from gpuherd.gpus.reservations import LIMITS, ReservationRules
    from gpuherd.gpus.reservations import RULES as RESERVATION_RULES

    enabled = _is_enabled(table)
    limits = _reservation_limits(table, LIMITS)
    lapse_after, horizon = table.get("lapse_after", duration_s), table.get("unknown_horizon", _duration_or_none_s)
    if lapse_after is not None and lapse_after < _SHORTEST_LAPSE_S:
        raise table.wrong("lapse_after", f"is below {_SHORTEST_LAPSE_S:g} s, in which a job may wait for its GPU")
    return ReservationRules(
        enabled=enabled,
        limits=limits,
        limits_of={
            name: _reservation_limits(user.table("reservations", _RESERVATION_LIMITS), limits)
            for name, user in users.items()
            if "reservations" in user.values
        },
        lapse_after_s=RESERVATION_RULES.lapse_after_s if lapse_after is None else lapse_after,
        unknown_horizon_s=RESERVATION_RULES.unknown_horizon_s if horizon is None else horizon,
    )


def _reservation_limits(table: _Table, usual: ReservationLimits) -> ReservationLimits:
    from gpuherd.gpus.reservations import ReservationLimits

    most, longest, ahead = (
        table.get("max_gpus", count),
        table.get("max_hours", _hours_s),
        table.get("max_ahead", duration_s),
    )
    return ReservationLimits(
        max_gpus=usual.max_gpus if most is None else most,
        max_s=usual.max_s if longest is None else longest,
        max_ahead_s=usual.max_ahead_s if ahead is None else ahead,
    )


def _hours_s(word: str) -> float:
    """A number of hours, or a length of time with its unit, in seconds."""
    try:
        return amount(word) * 3600
    except ValueError:
        return duration_s(word)


def _duration_or_none_s(word: str) -> float:
    """A length of time, or 0 for none."""
    return 0.0 if word.strip() == "0" else duration_s(word)


def _hours(limits: _Table) -> Hours:
    return Hours(limits.get("quiet_hours", parse_quiet_hours, many=True), limits.get("quiet_max_gpus", count) or 0)


def _defaults(table: _Table) -> dict[str, Any]:
    """Defaults of options, by field of ``DispatchOptions``; a key is any spelling of the option."""
    from gpuherd.jobs.options import DispatchOptions  # with all engines, which a look for the file doesn't need

    options = by_spelling(DispatchOptions)
    values: dict[str, Any] = {}
    for key in table.values:
        name = key.replace("-", "_")
        table.check_key(key, name, options)
        declared, spec = options[name]
        if declared.name in values:
            raise table.wrong(key, f"says the same as another setting of the table: {declared.name}; keep one of them")
        values[declared.name] = table.value(key, spec)
    return values
