"""What a reader of a run's page must know before believing anything: the gravest doubts first, each once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuherd.qa.judging.label_quality import Kind, Warned
from gpuherd.qa.look.chunks import Chunks
from gpuherd.qa.look.shown import Shown

# A judge that does not look at the answers spoils all that follows; what was merely left out comes last.
_GRAVEST_FIRST = (
    Kind.NOTHING,
    Kind.SAYS_ONE_THING,
    Kind.INVERTED,
    Kind.CHANCE_AGREEMENT,
    Kind.EXTREME_RATE,
    Kind.APART,
    Kind.ONE_CLASS,
    Kind.FEW_OF_A_CLASS,
    Kind.FLIPPED,
    Kind.NAN,
    Kind.UNPARSED,
    Kind.NOT_ATTEMPTED,
)


def notes_of(shown: Shown, chunks: Chunks) -> list[str]:
    """Doubts about the labels that figures are made of, then about other judgings', then what the page leaves out."""
    names = [each.meta.name for each in shown.judgings]
    evaluated = [(each.judging, each.warnings) for each in (shown.evaluation.judges if shown.evaluation else ())]
    audited = [(each.name, each.warnings) for each in shown.audits]
    doubts: dict[object, str] = {}
    for what, text in (*_doubts(evaluated, names), *_doubts(audited, names)):
        doubts.setdefault(what, text)
    told = [*doubts.values(), *shown.notes]
    if chunks.cut:
        told.append("To limit the size of this page, long texts and samples are cut; answers.jsonl has all.")
    if chunks.answers < len(shown.answers):
        told.append(
            f"The first {chunks.answers} of {len(shown.answers)} answers can be looked at; all are in every figure."
        )
    return list(dict.fromkeys(told))


def _doubts(judgings: Sequence[tuple[str, Sequence[Warned]]], names: Sequence[str]) -> Iterator[tuple[object, str]]:
    """What each is about, and its sentence."""
    doubts = [(name, each) for name, warnings in judgings for each in warnings]
    for name, each in sorted(doubts, key=lambda doubt: _GRAVEST_FIRST.index(doubt[1].kind)):
        # Of several judgings: whose labels?
        text = f"{name}: {each.text}" if len(names) > 1 and name not in each.text else each.text
        # That two judgings part is the same, whichever of them says so.
        yield frozenset(each for each in names if each in text) if each.kind is Kind.FLIPPED else text, text
