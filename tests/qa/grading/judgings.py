"""Judgings for tests: verdicts given as a text of letters, written as a judge would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpuherd.qa.folder import QADirectory
from gpuherd.qa.grading.files import JudgeKind, JudgingMeta, write_judging
from gpuherd.qa.grading.verdicts import Judgment, Verdict

LETTERS = {"+": Verdict.CORRECT, "-": Verdict.INCORRECT, "0": Verdict.NOT_ATTEMPTED, "?": Verdict.UNPARSED}


def some_meta(name: str = "exact-01234567", **changes: Any) -> JudgingMeta:
    """The description of a judging; counts and digest are for ``write_judging`` to fill in."""
    values: dict[str, Any] = {
        "name": name,
        "judge": name.rpartition("-")[0] or name,
        "kind": JudgeKind.EXACT,
        "answers": "greedy",
        "answers_sha256": "0" * 64,
        "counts": dict.fromkeys(Verdict, 0),
        "sha256": "",
        "made": "2026-01-02T03:04:05+00:00",
    }
    return JudgingMeta(**(values | changes))


def some_judgments(letters: str, ids: Iterable[str] | None = None, which: str = "greedy") -> list[Judgment]:
    """A judgment a letter: + correct, - incorrect, 0 not attempted, ? unparsed; of questions q0, q1, ... or ``ids``."""
    names = [f"q{number}" for number in range(len(letters))] if ids is None else list(ids)
    return [Judgment(name, which, LETTERS[letter]) for name, letter in zip(names, letters, strict=True)]


def make_judging(
    folder: QADirectory, letters: str, *, ids: Iterable[str] | None = None, which: str = "greedy", **meta: Any
) -> JudgingMeta:
    """Writes a judging of these verdicts into a run's folder. ``meta``: what ``some_meta`` takes."""
    return write_judging(folder, some_meta(**meta), some_judgments(letters, ids, which))
