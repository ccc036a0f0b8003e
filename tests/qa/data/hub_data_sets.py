"""Small data sets with the columns and types of the real ones on the Hub, as folders of Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_TEXTS = pa.list_(pa.string())
_TRIVIA_ANSWER = pa.struct(
    [
        ("aliases", _TEXTS),
        ("normalized_aliases", _TEXTS),
        ("matched_wiki_entity_name", pa.string()),
        ("normalized_matched_wiki_entity_name", pa.string()),
        ("normalized_value", pa.string()),
        ("type", pa.string()),
        ("value", pa.string()),
    ]
)


def write_data_set(root: Path, hub_id: str, config: str, splits: dict[str, pa.Table], **others: pa.Table) -> None:
    """``root/<hub_id>`` with a Parquet file a split, and the card that names them.

    Args:
        others: tables of other configs, by their names: each is the config's split "test".
    """
    lines = ["---", "configs:"]
    for name, parts in {config: splits, **{other: {"test": table} for other, table in others.items()}}.items():
        folder = root / hub_id / name
        folder.mkdir(parents=True)
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, table in parts.items():
            pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (root / hub_id / "README.md").write_text("\n".join([*lines, "---", ""]))


def table(**columns: Any) -> pa.Table:
    """Columns of values; a pair of values and a type where the type has to be said."""
    return pa.table({name: pa.array(*each) if isinstance(each, tuple) else each for name, each in columns.items()})


def no_utf_8() -> pa.Array:
    """Three texts, of which the second is none."""
    texts = pa.array([b"one?", b"caf\xe9?", b"three?"], pa.binary())
    return pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])


def _trivia(rows: list[tuple[str, str, str, list[str]]]) -> pa.Table:
    answers = [
        {"aliases": aliases, "normalized_aliases": [], "value": value, "type": "WikipediaEntity"}
        for _, _, value, aliases in rows
    ]
    return table(
        question=[row[1] for row in rows],
        question_id=[row[0] for row in rows],
        question_source=["a quiz"] * len(rows),
        answer=(answers, _TRIVIA_ANSWER),
    )


def _squad(rows: list[tuple[str, str, str, list[str]]]) -> pa.Table:
    kind = pa.struct([("text", _TEXTS), ("answer_start", pa.list_(pa.int32()))])
    answers = [{"text": texts, "answer_start": [0] * len(texts)} for *_, texts in rows]
    return table(
        id=[row[0] for row in rows],
        title=["a title"] * len(rows),
        context=[row[1] for row in rows],
        question=[row[2] for row in rows],
        answers=(answers, kind),
    )


def _coqa(rows: list[tuple[str, list[str], list[str]]]) -> pa.Table:
    kind = pa.struct(
        [("input_text", _TEXTS), ("answer_start", pa.list_(pa.int32())), ("answer_end", pa.list_(pa.int32()))]
    )
    answers = [
        {"input_text": said, "answer_start": [0] * len(said), "answer_end": [1] * len(said)} for *_, said in rows
    ]
    return table(
        source=["wikipedia"] * len(rows),
        story=[row[0] for row in rows],
        questions=([row[1] for row in rows], _TEXTS),
        answers=(answers, kind),
    )


def _svamp(rows: list[tuple[str, str, str, str]]) -> pa.Table:
    return table(
        ID=[row[0] for row in rows],
        Body=[row[1] for row in rows],
        Question=[row[2] for row in rows],
        Equation=["( 2.0 + 2.0 )"] * len(rows),
        Answer=[row[3] for row in rows],
        Type=["Addition"] * len(rows),
        question_concat=[f"{row[1]} {row[2]}" for row in rows],
    )


def _sciq(questions: list[str], answers: list[str], supports: list[str]) -> pa.Table:
    wrong = {f"distractor{n}": ["nothing"] * len(questions) for n in (3, 1, 2)}
    return table(question=questions, **wrong, correct_answer=answers, support=supports)


def write_all(root: Path) -> None:
    """Each data set that has an adapter, and one that has none, in few rows that hold what is peculiar to it."""
    trivia = [
        ("tc_1", "Who wrote Emma?", "Jane Austen", ["Austen", "Jane Austen"]),
        ("tc_1", "Who wrote Emma?", "Jane Austen", ["Austen"]),
        ("tc_2", "Capital of Peru?", "Lima", ["Lima, Peru"]),
    ]
    write_data_set(
        root,
        "mandarjoshi/trivia_qa",
        "rc.nocontext",
        {
            "train": _trivia(
                [("tc_9", "Capital of Chad?", "N'Djamena", []), ("tc_2b", "Capital of Peru?", "Lima", [])]
            ),
            "validation": _trivia(trivia),
            "test": _trivia([("tc_7", "Who?", "<unk>", [])]),
        },
    )
    squad = [
        ("56be", "Beyoncé sang.", "Who sang?", ["Beyoncé", "Beyoncé"]),
        ("5a8d", "Beyoncé sang.", "Who danced?", []),
    ]
    write_data_set(root, "rajpurkar/squad_v2", "squad_v2", {"validation": _squad(squad)})
    nq = table(question=["when was the moon landing"], answer=([["1969", "July 1969"]], pa.list_(pa.string())))
    write_data_set(root, "google-research-datasets/nq_open", "nq_open", {"validation": nq})
    svamp = [("chal-1", "Ann has 3 pens", "How many has she?", "3.0"), ("chal-2", "Bo ran.", "How far?", "145")]
    write_data_set(root, "ChilleD/SVAMP", "default", {"test": _svamp(svamp)})
    coqa = [("Cotton was a white kitten.", ["What color was Cotton?", "Was she a dog?"], ["white", "no"])]
    write_data_set(root, "stanfordnlp/coqa", "default", {"validation": _coqa(coqa)})
    sciq = _sciq(["What bends light?"], ["a lens"], ["A lens bends light."])
    write_data_set(root, "allenai/sciq", "default", {"validation": sciq})
    bioasq = table(
        question=["Is Hirschsprung disease mendelian?"],
        answer=["It is multifactorial."],
        relevant_passage_ids=["[1, 2]"],
        id=[55031181],
    )
    write_data_set(root, "rag-datasets/rag-mini-bioasq", "question-answer-passages", {"test": bioasq})
    solution = "She has 2+2=<<2+2=4>>4.\n#### 4"
    gsm8k = table(question=["Two and two?", "No result?"], answer=[solution, "It is four."])
    train = table(question=["One and one?"], answer=["1+1=<<1+1=2>>2.\n#### 2"])
    write_data_set(root, "openai/gsm8k", "main", {"train": train, "test": gsm8k})
    truthful = table(
        type=["Adversarial"] * 2,
        category=["Misconceptions"] * 2,
        question=["Do cats have nine lives?", "Is glass a liquid?"],
        best_answer=["Cats have one life", "No"],
        correct_answers=([["Cats have one life", "No, one"], ["It is a solid"]], pa.list_(pa.string())),
        incorrect_answers=([["Nine"], ["Yes"]], pa.list_(pa.string())),
        source=["somewhere"] * 2,
    )
    write_data_set(root, "truthfulqa/truthful_qa", "generation", {"validation": truthful})
    own = table(question=["Sky?", "Grass?"], answer=["blue", "green"], context=["Look up.", None], other=[1, 2])
    write_data_set(root, "someone/colours", "small", {"test": own})
    (root / "someone" / "code").mkdir(parents=True)
    (root / "someone" / "code" / "code.py").write_text("raise SystemExit('the code of a data set ran')\n")
