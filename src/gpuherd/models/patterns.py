"""Which of an adapter's patterns matches which module, by PEFT's rule and in bounded time.

PEFT matches a key of ``rank_pattern`` or ``alpha_pattern`` as the regular expression ``(.*\\.)?(key)$``. The keys come
out of files that strangers made, and one such as ``(a+)+b`` can keep Python's matcher busy for years. Plain names,
which is what nearly every adapter has, are matched here; anything else in a process of its own that has a time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from gpuherd.errors import BadModel
from gpuherd.models.names import shown

LIMIT_S = 10.0
# Patterns times characters of names: a second's work at most.
MAX_PLAIN_WORK = 50_000_000
# No quantifier, group or choice: the matcher can't go back and forth. A dot is any character, as in PEFT.
_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\\.)+")

_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
patterns, names = json.load(sys.stdin)
compiled = []
for number, pattern in enumerate(patterns):
    try:
        compiled.append(re.compile(rf"(.*\\.)?({pattern})$"))
    except (re.error, OverflowError, RecursionError):
        print(json.dumps(number))
        break
else:
    print(json.dumps([next((i for i, p in enumerate(compiled) if p.match(name)), None) for name in names]))
"""


def first_matches(patterns: Sequence[str], names: Sequence[str], *, limit_s: float = LIMIT_S) -> list[str | None]:
    """For each module name the first pattern that matches its end, None where none does.

    Raises BadModel for a pattern that is no regular expression, or when matching takes longer than ``limit_s`` seconds.
    """
    if len(patterns) * sum(map(len, names)) <= MAX_PLAIN_WORK and all(map(_PLAIN.fullmatch, patterns)):
        compiled = [(pattern, re.compile(rf"(.*\.)?({pattern})$")) for pattern in patterns]
        return [next((pattern for pattern, rule in compiled if rule.match(name)), None) for name in names]
    return _matched_apart(patterns, names, limit_s)


def _matched_apart(patterns: Sequence[str], names: Sequence[str], limit_s: float) -> list[str | None]:
    """The same, in a child process."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([patterns, names]).encode("ascii"),
            capture_output=True,
            timeout=limit_s,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise BadModel(f"{_first(patterns)} can't be matched in {limit_s:g} s") from None
    except subprocess.CalledProcessError:
        raise BadModel(f"{_first(patterns)} can't be matched; they take too much memory") from None
    answer = json.loads(child.stdout)
    if isinstance(answer, int):
        raise BadModel(f"the pattern {shown(patterns[answer])} is no regular expression")
    return [None if number is None else patterns[number] for number in answer]


def _first(patterns: Sequence[str]) -> str:
    return f"the patterns ({shown(patterns[0])}{', ...' if len(patterns) > 1 else ''})"
