"""Rows of files and of data sets without an adapter of their own: question, answers or answer, context, id.

A file of a data set that has an adapter, as it lies on the Hub, is recognised by its columns; so are nq_open's rows (a
question, a list of answers and nothing else), gsm8k's (an answer that ends in ``#### 18``) and the files of the BioASQ
challenge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from gpuherd.options import nearest
from gpuherd.qa.data.adapters import bioasq, gsm8k
from gpuherd.qa.data.adapters.registry import Adapter, adapters
from gpuherd.qa.data.rows import Draft, Unusable

_OWN = frozenset({"question", "answers", "answer", "context", "id"})
_CHALLENGE = frozenset({"body", "type", "exact_answer", "ideal_answer", "snippets", "id"})
_SHOWN = 40  # characters of a column's name in a message
_ASKING = frozenset({"question", "Question", "questions", "body"})  # one of these holds what is asked


def worth_reading(columns: Iterable[str]) -> list[str] | None:
    """Of a table's columns those that can matter: not its embeddings, pictures or documents.

    None: all of them, since no question is among them, and whoever reads the error should see what there is.
    """
    known = (_OWN | _CHALLENGE).union(*(each.columns for each in adapters().values()))
    kept = [name for name in columns if name in known]
    return kept if _ASKING.intersection(kept) else None


def data_set_of(row: Mapping[str, Any]) -> Adapter | None:
    """The data set that a row is of, by its columns and by what stands in them; None of one that is not known."""
    for each in adapters().values():
        if each.columns and each.columns <= row.keys():
            with suppress(KeyError, TypeError, AttributeError):  # the same columns with something else in them
                list(each.drafts(row))
                return each
    answer = row.get("answer")
    if row.keys() == {"question", "answer"} and isinstance(answer, list):
        return adapters()["nq_open"]
    of_gsm8k = "question" in row and isinstance(answer, str) and gsm8k.result_of(answer) is not None
    return adapters()["gsm8k"] if of_gsm8k and row.get("answers") is None else None


def drafts(row: Mapping[str, Any]) -> Iterable[Draft | Unusable]:
    """The question of a row, or which column is missing and what may have been meant by it."""
    data_set = data_set_of(row)
    if data_set is not None:
        return data_set.drafts(row)
    if bioasq.is_challenge_row(row):
        return bioasq.challenge_drafts(row)
    if "question" not in row:
        return [Unusable(f"no column 'question'{_nearest('question', row)}", row.get("id"))]
    if row.get("answers") is None and row.get("answer") is None:
        known = "answers" in row or "answer" in row
        missing = "there is no reference answer" if known else f"no column 'answers'{_nearest('answers', row)}"
        return [Unusable(missing, row.get("id"))]
    return _as_named(row)


def _as_named(row: Mapping[str, Any]) -> Iterator[Draft]:
    answers = row["answer"] if row.get("answers") is None else row["answers"]
    yield Draft(row["question"], answers, row.get("context"), row.get("id"))


def _nearest(wanted: str, row: Mapping[str, Any]) -> str:
    """The columns that there are, the one first that is most like the wanted one."""
    by_lower = {name.lower(): name for name in map(str, row)}
    near = [by_lower[each] for each in nearest(wanted, by_lower, cutoff=0.5)]
    others = [name[:_SHOWN] for name in map(str, row) if name not in near][:8]
    if near:
        return f"; did you mean {near[0][:_SHOWN]!r}? Rename it, please"
    return f" among {', '.join(map(repr, others))}" if others else ", nor any other"
