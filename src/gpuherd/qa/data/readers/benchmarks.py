"""The data sets that are known by name: the questions of their rows, and where they are on the Hub; and plain rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from gpuherd.options import nearest
from gpuherd.qa.data.questions import UncheckedQuestion, Unusable, content_id
from gpuherd.qa.data.readers.registry import DatasetReader, by_columns, dataset_readers, register

# ---- rows that are one question each, in columns of their own or nearly so -------------------------------------------

# Natural Questions, open (Lee et al. 2019, arXiv 1906.00300): questions to a search engine, closed book.
NQ_OPEN = register(DatasetReader("nq_open", "google-research-datasets/nq_open", by_columns("question", "answer")))

# SciQ (Welbl et al. 2017, arXiv 1707.06209): school science, asked without its wrong choices.
SCIQ = register(
    DatasetReader(
        "sciq",
        "allenai/sciq",
        by_columns("question", "correct_answer", context="support"),
        columns=frozenset({"question", "correct_answer", "support"}),
    )
)

# TruthfulQA (Lin et al. 2022, arXiv 2109.07958), generation: questions that people answer wrongly out of habit.
TRUTHFUL_QA = register(
    DatasetReader(
        "truthful_qa",
        "truthfulqa/truthful_qa",
        by_columns("question", "best_answer", "correct_answers"),
        config="generation",
        few_shot_split=None,
        columns=frozenset({"question", "best_answer", "correct_answers"}),
    )
)


def squad_v2_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion | Unusable]:
    """The question of its passage; answers can't be scored for one that the passage does not answer."""
    if not row["answers"]["text"]:
        yield Unusable("unanswerable, as the data set says", row["id"])
        return
    yield UncheckedQuestion(row["question"], row["answers"]["text"], row["context"], row["id"])


# SQuAD 2.0 (Rajpurkar et al. 2018, arXiv 1806.03822): questions about a passage.
SQUAD_V2 = register(
    DatasetReader(
        "squad_v2",
        "rajpurkar/squad_v2",
        squad_v2_drafts,
        context_is_part=True,
        columns=frozenset({"id", "title", "context", "question", "answers"}),
    )
)

_HIDDEN = "<unk>"  # the answers of the test split of TriviaQA


def trivia_qa_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion | Unusable]:
    """The question with the answer's value first, then its aliases."""
    answer = row["answer"]
    if answer["value"] == _HIDDEN:
        yield Unusable("the data set does not tell the answers of this split", row["question_id"])
        return
    yield UncheckedQuestion(row["question"], [answer["value"], *answer["aliases"]], id=row["question_id"])


# TriviaQA (Joshi et al. 2017, arXiv 1705.03551), closed book, with all aliases of an answer. The configuration lists a
# question again for each of its documents; the repetitions are refused like any other.
TRIVIA_QA = register(
    DatasetReader(
        "trivia_qa",
        "mandarjoshi/trivia_qa",
        trivia_qa_drafts,
        config="rc.nocontext",
        columns=frozenset({"question", "question_id", "question_source", "answer"}),
    )
)

_INTEGER = re.compile(r"(-?\d+)\.0+")


def svamp_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion]:
    """Body and question as one text; the answer 145.0 as 145, which is how people write it."""
    body, question = row["Body"].strip(), row["Question"].strip()
    integer = _INTEGER.fullmatch(str(row["Answer"]).strip())
    answer = integer[1] if integer else row["Answer"]
    stop = "" if not body or body[-1] in ".?!,;:" else "."
    yield UncheckedQuestion(f"{body}{stop} {question}".strip(), answer, id=row["ID"])


# SVAMP (Patel et al. 2021, arXiv 2103.07191): sums in words of one step. A body and a question make one question.
SVAMP = register(
    DatasetReader(
        "svamp",
        "ChilleD/SVAMP",
        svamp_drafts,
        split="test",
        columns=frozenset({"ID", "Body", "Question", "Answer"}),
    )
)


# ---- BioASQ ----------------------------------------------------------------------------------------------------------
#
# Task B (Krithara et al. 2023, doi 10.1038/s41597-023-02068-4): biomedical questions of experts.
#
# The Hub has its questions with ideal answers (``rag-datasets/rag-mini-bioasq``); the challenge's own files
# (``training11b.json``: body, exact_answer, ideal_answer, snippets) need an account there and are read as local
# files.


def bioasq_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion]:
    """The question with its ideal answer."""
    yield UncheckedQuestion(row["question"], row["answer"], id=row.get("id"))


def is_bioasq_challenge(row: Mapping[str, Any]) -> bool:
    """Whether it is an entry of the challenge's own files."""
    return "body" in row and ("exact_answer" in row or "ideal_answer" in row)


def bioasq_challenge_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion | Unusable]:
    """An entry of the challenge's files: the exact answers of factoid and yes/no questions, else the ideal ones.

    A question that asks for a list has no answer that one text could match, and is refused.
    """
    if row.get("type") == "list":
        yield Unusable("asks for a list of answers", row.get("id"))
        return
    answers = _flat(row.get("exact_answer") or row.get("ideal_answer"))
    snippets = row.get("snippets") or []
    texts = [each["text"] for each in snippets if isinstance(each, Mapping) and "text" in each]
    yield UncheckedQuestion(row["body"], answers, texts, row.get("id"))


def _flat(answers: Any) -> list[Any]:
    """Exact answers stand one or two lists deep: synonyms of one answer."""
    if not isinstance(answers, list):
        return [answers]
    return [each for one in answers for each in (one if isinstance(one, list) else [one])]


register(
    DatasetReader(
        "bioasq",
        "rag-datasets/rag-mini-bioasq",
        bioasq_drafts,
        config="question-answer-passages",
        split="test",
        few_shot_split=None,
        columns=frozenset({"question", "answer", "relevant_passage_ids", "id"}),
    )
)


# ---- CoQA ------------------------------------------------------------------------------------------------------------
#
# Reddy et al. 2019, arXiv 1808.07042: conversations about a text. A row is a conversation, a question a turn.
#
# A turn ("And where?") means nothing without those before it: they stand in its context, with their own answers.


def coqa_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion]:
    """A question a turn; its context is the text and the conversation so far."""
    story: str = row["story"].strip()
    questions, answers = row["questions"], row["answers"]["input_text"]
    conversation = content_id(story, questions[0] if questions else None)
    turns: list[str] = []
    for turn, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        context = story if not turns else f"{story}\n\nThe conversation so far:\n" + "\n".join(turns)
        yield UncheckedQuestion(question, answer, context, f"{conversation}-{turn:02d}", f"turn {turn}")
        turns.append(f"Q: {question.strip()}\nA: {answer.strip()}")


register(
    DatasetReader(
        "coqa",
        "stanfordnlp/coqa",
        coqa_drafts,
        context_is_part=True,
        columns=frozenset({"story", "questions", "answers"}),
    )
)


# ---- GSM8K -----------------------------------------------------------------------------------------------------------
#
# Cobbe et al. 2021, arXiv 2110.14168: sums in words of several steps. The answer is the number behind ####.

_CALCULATION = re.compile(r"<<[^<>\n]*>>")  # notes for the authors' calculator


def gsm8k_drafts(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion | Unusable]:
    """The question with its number; the solution, without notes for a calculator, as the worked answer."""
    number = gsm8k_result(row["answer"])
    if number is None:
        yield Unusable("no number behind ####")
        return
    yield UncheckedQuestion(
        row["question"], number, id=row.get("id"), worked=_CALCULATION.sub("", row["answer"]).strip()
    )


def gsm8k_result(solution: str) -> str | None:
    """The result behind the #### of a solution's last line, without thousands' commas; None if there is none.

    >>> gsm8k_result("She has 1,200 + 34.\\n#### 1,234")
    '1234'
    """
    last = solution.rstrip().rpartition("\n")[2]
    result = last.removeprefix("####").strip()
    return re.sub(r"(?<=\d),(?=\d{3})", "", result) if last.startswith("####") and result else None


register(DatasetReader("gsm8k", "openai/gsm8k", gsm8k_drafts, config="main", split="test"))


# ---- plain rows ------------------------------------------------------------------------------------------------------
#
# Rows of files and of data sets without a reader of their own: question, answers or answer, context, id.
#
# A file of a known data set, as it is on the Hub, is recognised by its columns; so are nq_open's rows (a question, a
# list of answers and nothing else), gsm8k's (an answer that ends in ``#### 18``) and the files of the BioASQ challenge.

_OWN = frozenset({"question", "answers", "answer", "context", "id"})
_CHALLENGE = frozenset({"body", "type", "exact_answer", "ideal_answer", "snippets", "id"})
_LONGEST_NAME = 40  # characters of a column's name in a message
_ASKING = frozenset({"question", "Question", "questions", "body"})  # one of these holds what is asked


def columns_to_read(columns: Iterable[str]) -> list[str] | None:
    """The columns of a table that can matter: not its embeddings, pictures or documents.

    None: all of them, since none holds a question, and the error should name what there is.
    """
    known = (_OWN | _CHALLENGE).union(*(each.columns for each in dataset_readers().values()))
    kept = [name for name in columns if name in known]
    return kept if _ASKING.intersection(kept) else None


def data_set_of(row: Mapping[str, Any]) -> DatasetReader | None:
    """The known data set that a row is of, by its columns and their values; None for an unknown one."""
    for each in dataset_readers().values():
        if each.columns and each.columns <= row.keys():
            with suppress(KeyError, TypeError, AttributeError):  # the same columns with something else in them
                list(each.drafts(row))
                return each
    answer = row.get("answer")
    if row.keys() == {"question", "answer"} and isinstance(answer, list):
        return dataset_readers()["nq_open"]
    of_gsm8k = "question" in row and isinstance(answer, str) and gsm8k_result(answer) is not None
    return dataset_readers()["gsm8k"] if of_gsm8k and row.get("answers") is None else None


def plain_drafts(row: Mapping[str, Any]) -> Iterable[UncheckedQuestion | Unusable]:
    """The question of a row, or which column is missing and which of the others is nearest."""
    data_set = data_set_of(row)
    if data_set is not None:
        return data_set.drafts(row)
    if is_bioasq_challenge(row):
        return bioasq_challenge_drafts(row)
    if "question" not in row:
        return [Unusable(f"no column 'question'{_nearest('question', row)}", row.get("id"))]
    if row.get("answers") is None and row.get("answer") is None:
        known = "answers" in row or "answer" in row
        missing = "there is no reference answer" if known else f"no column 'answers'{_nearest('answers', row)}"
        return [Unusable(missing, row.get("id"))]
    return _as_named(row)


def _as_named(row: Mapping[str, Any]) -> Iterator[UncheckedQuestion]:
    answers = row["answer"] if row.get("answers") is None else row["answers"]
    yield UncheckedQuestion(row["question"], answers, row.get("context"), row.get("id"))


def _nearest(column: str, row: Mapping[str, Any]) -> str:
    """The end of a message about a missing column: the nearest one, else the others."""
    by_lower = {name.lower(): name for name in map(str, row)}
    near = [by_lower[each] for each in nearest(column, by_lower, cutoff=0.5)]
    others = [name[:_LONGEST_NAME] for name in map(str, row) if name not in near][:8]
    if near:
        return f"; did you mean {near[0][:_LONGEST_NAME]!r}? Rename it, please"
    return f" among {', '.join(map(repr, others))}" if others else ", nor any other"
