"""BioASQ, task B (Krithara et al. 2023, doi 10.1038/s41597-023-02068-4): biomedical questions of experts.

The Hub has its questions with ideal answers (``rag-datasets/rag-mini-bioasq``); the challenge's own files
(``training11b.json``: body, exact_answer, ideal_answer, snippets) need an account there and are read as local files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuherd.qa.data.adapters.registry import Adapter, adapter
from gpuherd.qa.data.rows import Draft, Unusable


def drafts(row: Mapping[str, Any]) -> Iterator[Draft]:
    """The question with its ideal answer."""
    yield Draft(row["question"], row["answer"], id=row.get("id"))


def is_challenge_row(row: Mapping[str, Any]) -> bool:
    """Whether it is an entry of the challenge's own files."""
    return "body" in row and ("exact_answer" in row or "ideal_answer" in row)


def challenge_drafts(row: Mapping[str, Any]) -> Iterator[Draft | Unusable]:
    """An entry of the challenge's files: the exact answers of factoid and yes/no questions, else the ideal ones.

    A question that asks for a list has no answer that one text could match, and is refused.
    """
    if row.get("type") == "list":
        yield Unusable("asks for a list of answers", row.get("id"))
        return
    answers = _flat(row.get("exact_answer") or row.get("ideal_answer"))
    snippets = row.get("snippets") or []
    texts = [each["text"] for each in snippets if isinstance(each, Mapping) and "text" in each]
    yield Draft(row["body"], answers, texts, row.get("id"))


def _flat(answers: Any) -> list[Any]:
    """Exact answers stand one or two lists deep: synonyms of one answer."""
    if not isinstance(answers, list):
        return [answers]
    return [each for one in answers for each in (one if isinstance(one, list) else [one])]


adapter(
    Adapter(
        "bioasq",
        "rag-datasets/rag-mini-bioasq",
        drafts,
        config="question-answer-passages",
        split="test",
        few_shot_split=None,
        columns=frozenset({"question", "answer", "relevant_passage_ids", "id"}),
    )
)
