"""Every adapter through the real ``datasets`` library, from a Hub on this machine with rows like the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.qa.data.hub_data_sets import no_utf_8, table, write_all, write_data_set
from tests.qa.data.hub_server import COMMIT, hub_of

# The address of the Hub is read when the library is imported: so each question set is read by a process of its own.
_READ = """
import json, sys
from gpuherd.errors import GpuherdError
from gpuherd.qa.data.load import QuestionOptions, load_questions
for arguments in json.loads(sys.argv[1]):
    try:
        seed = arguments.pop("seed", 0)
        found = load_questions(QuestionOptions(**arguments), seed=seed)
        value = {
            "questions": [[each.id, each.question, each.answers, each.context] for each in found.questions],
            "refused": [[each.row, each.reason] for each in found.refused],
            "source": found.source.to_dict(),
            "examples": [[each.answer, each.worked] for each in found.examples],
        }
    except GpuherdError as problem:
        value = {"error": type(problem).__name__, "said": str(problem)}
    print(json.dumps(value))
"""
_ASKED: dict[str, dict[str, Any]] = {
    name: {"dataset": name}
    for name in (
        *("trivia_qa", "squad_v2", "nq_open", "svamp", "coqa", "sciq", "bioasq", "gsm8k", "truthful_qa"),
        *("someone/colours:small", "openai/gsm8k", "someone/code", "someone/nothing"),
    )
} | {
    "no split": {"dataset": "gsm8k", "split": "exam"},
    "hidden answers": {"dataset": "trivia_qa", "split": "test"},
    "sciq open book": {"dataset": "sciq", "context": "yes"},
    "squad closed book": {"dataset": "squad_v2", "context": "no"},
    "gsm8k with examples": {"dataset": "gsm8k", "few_shot": 1},
    "trivia with examples": {"dataset": "trivia_qa", "few_shot": 1},
    "truthful with examples": {"dataset": "truthful_qa", "few_shot": 1},
}


def read(arguments: Mapping[str, dict[str, Any]], folder: Path, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _READ, json.dumps(list(arguments.values()))],
        cwd=folder,
        env={**os.environ, "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(arguments, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, home: Path) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("hub")
    write_all(root)
    folders: dict[str, dict[str, Any]] = {
        f"folder {name}": {"dataset": str(root / "someone" / name)} for name in ("colours", "code")
    }
    # A folder called like a reader of the library's, in the folder that somebody works in.
    write_data_set(root, "someone/csv", "default", {"test": table(question=["Sea?"], answer=["blue"])})
    folders["folder csv"] = {"dataset": "csv"}
    write_data_set(root, "someone/latin", "default", {"test": table(question=no_utf_8(), answer=["1", "2", "3"])})
    folders["folder latin"] = {"dataset": "latin"}
    folders["folder with examples"] = {"dataset": str(root / "openai" / "gsm8k"), "few_shot": 1}
    write_data_set(
        root, "someone/part", "default", {"test": table(question=["2 + 3?", "1 + 1?"], answer=["#### 5", "#### 2"])}
    )
    folders["folder part with examples"] = {"dataset": str(root / "someone" / "part"), "few_shot": 1}
    lists = pa.list_(pa.string())
    nq = {
        "train": table(question=["who wrote emma"], answer=([["Jane Austen"]], lists)),
        "validation": table(question=["when was the moon landing"], answer=([["1969", "July 1969"]], lists)),
    }
    write_data_set(root, "clones/nq", "nq_open", nq)
    folders["folder nq"] = {"dataset": str(root / "clones" / "nq"), "split": "validation", "few_shot": 1}
    questions = table(
        question=["Is it?", "Was it?"], answer=["It is.", "It was."], relevant_passage_ids=["[1]"] * 2, id=[1, 2]
    )
    passages = table(passage=["A text."], id=[1])
    write_data_set(root, "clones/bioasq", "question-answer-passages", {"test": questions}, corpus=passages)
    folders["folder bioasq"] = {"dataset": str(root / "clones" / "bioasq"), "few_shot": 1}
    one, other = (table(question=[text], answer=["#### 5"]) for text in ("2 + 3?", "1 + 4?"))
    write_data_set(root, "clones/gsm8k", "main", {"train": one, "test": other}, socratic=one)
    folders["folder gsm8k"] = {"dataset": str(root / "clones" / "gsm8k"), "few_shot": 1}
    folders["folder socratic"] = {"dataset": f"{root / 'clones' / 'gsm8k'}:socratic"}
    write_data_set(root, "clones/several", "one", {"test": one}, other=other)
    folders["folder several"] = {"dataset": str(root / "clones" / "several")}
    folders["folder train"] = {"dataset": str(root / "openai" / "gsm8k"), "split": "train"}
    with hub_of(root) as address:
        return read(_ASKED | folders, root / "someone", HF_ENDPOINT=address, HF_HOME=str(home))


def test_trivia_qa_has_aliases_and_each_question_once(found: dict[str, Any]) -> None:
    trivia = found["trivia_qa"]
    assert trivia["questions"][0] == ["tc_1", "Who wrote Emma?", ["Jane Austen", "Austen"], None]
    assert trivia["refused"] == [["row 2", "the same question as row 1"]]
    assert trivia["source"] | {"sha256": ""} == {
        "name": "mandarjoshi/trivia_qa",
        "config": "rc.nocontext",
        "split": "validation",
        "revision": COMMIT,
        "sha256": "",
        "rows": 3,
    }


def test_answers_that_a_split_hides_are_no_answers(found: dict[str, Any]) -> None:
    assert found["hidden answers"]["error"] == "BadQuestions"
    assert "does not tell the answers" in found["hidden answers"]["said"]


def test_squad_v2_refuses_what_can_not_be_answered(found: dict[str, Any]) -> None:
    assert found["squad_v2"]["questions"] == [["56be", "Who sang?", ["Beyoncé"], "Beyoncé sang."]]
    assert found["squad_v2"]["refused"] == [["row 2", "unanswerable, as the data set says"]]
    assert found["squad closed book"]["questions"][0][3] is None


def test_coqa_keeps_the_conversation(found: dict[str, Any]) -> None:
    first, second = found["coqa"]["questions"]
    assert first[3] == "Cotton was a white kitten."
    assert second[1:3] == ["Was she a dog?", ["no"]]
    assert second[3].startswith("Cotton was a white kitten.")
    assert "Q: What color was Cotton?\nA: white" in second[3]
    assert first[0][:-2] == second[0][:-2] != ""


def test_the_others(found: dict[str, Any]) -> None:
    assert found["nq_open"]["questions"][0][1:] == ["when was the moon landing", ["1969", "July 1969"], None]
    assert [each[:3] for each in found["svamp"]["questions"]] == [
        ["chal-1", "Ann has 3 pens. How many has she?", ["3"]],
        ["chal-2", "Bo ran. How far?", ["145"]],
    ]
    assert found["sciq"]["questions"][0][1:] == ["What bends light?", ["a lens"], None]
    assert found["sciq open book"]["questions"][0][3] == "A lens bends light."
    assert found["bioasq"]["questions"][0][0] == "55031181"
    assert found["gsm8k"]["questions"][0][1:3] == ["Two and two?", ["4"]]
    assert found["gsm8k"]["refused"] == [["row 2", "no number behind ####"]]
    assert found["truthful_qa"]["questions"][0][2] == ["Cats have one life", "No, one"]


def test_a_data_set_by_its_columns_and_one_of_ours_by_its_full_name(found: dict[str, Any]) -> None:
    assert [each[1:] for each in found["someone/colours:small"]["questions"]] == [
        ["Sky?", ["blue"], "Look up."],
        ["Grass?", ["green"], None],
    ]
    assert found["openai/gsm8k"]["questions"] == found["gsm8k"]["questions"]


def test_examples_are_from_the_training_split_and_never_asked(found: dict[str, Any]) -> None:
    assert found["gsm8k with examples"]["examples"] == [["2", "1+1=2.\n#### 2"]]
    assert found["gsm8k with examples"]["questions"] == found["gsm8k"]["questions"]
    # "Capital of Peru?" is in both splits of this one: it may not be shown.
    assert found["trivia with examples"]["examples"] == [["N'Djamena", None]]
    truthful = found["truthful with examples"]
    assert len(truthful["questions"]) == len(truthful["examples"]) == 1
    assert truthful["examples"][0][0] not in truthful["questions"][0][2]


def test_code_of_a_data_set_is_not_run(found: dict[str, Any]) -> None:
    assert found["someone/code"]["error"] == "BadQuestions"
    assert "never" in found["someone/code"]["said"]


def test_a_folder_is_read_like_a_data_set_of_the_hub(found: dict[str, Any]) -> None:
    assert found["folder colours"]["questions"] == found["someone/colours:small"]["questions"]
    assert found["folder colours"]["source"]["revision"] is None
    assert found["folder csv"]["questions"][0][1:3] == ["Sea?", ["blue"]]
    assert found["folder train"]["questions"][0][1:3] == ["One and one?", ["2"]]
    assert found["folder code"]["error"] in ("BadQuestions", "MissingQuestions")


def test_a_row_that_is_no_utf_8_is_refused_alone(found: dict[str, Any]) -> None:
    assert [each[1] for each in found["folder latin"]["questions"]] == ["one?", "three?"]
    assert found["folder latin"]["refused"] == [["row 2", "bytes that are no UTF-8"]]


def test_what_is_not_there_is_told(found: dict[str, Any]) -> None:
    for name, word in {"someone/nothing": "someone/nothing", "no split": "exam"}.items():
        assert found[name]["error"] == "MissingQuestions"
        assert word in found[name]["said"]


@pytest.mark.slow  # another process that imports the library
def test_a_hub_that_does_not_answer_is_asked_once_and_told(found: dict[str, Any], home: Path, tmp_path: Path) -> None:
    asked = {"gsm8k": _ASKED["gsm8k"], "someone/else": {"dataset": "someone/else"}}
    before = time.monotonic()
    told = read(asked, tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(home))
    assert time.monotonic() - before < 15  # the library alone takes 25 s to say so
    assert told["gsm8k"] == found["gsm8k"]
    assert told["someone/else"]["error"] == "MissingQuestions"
    assert (
        "not in the local cache, and the Hugging Face Hub can't be reached (http://127.0.0.1:9: ConnectError"
        in (told["someone/else"]["said"])
    )


@pytest.mark.slow  # another process that imports the library
def test_what_was_fetched_once_is_read_without_a_network(found: dict[str, Any], home: Path) -> None:
    asked = {"gsm8k": _ASKED["gsm8k"]}
    again = read(asked, home, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert again["gsm8k"] == found["gsm8k"]


def test_a_known_data_set_in_a_folder_takes_its_examples_from_its_training_split(found: dict[str, Any]) -> None:
    """None of what is asked is shown, and all of it is asked, as by the data set's name."""
    local, by_name = found["folder with examples"], found["gsm8k with examples"]
    assert local["examples"] == by_name["examples"] != []
    assert by_name["questions"][0][1:3] in [each[1:3] for each in local["questions"]]
    # Where there is no training split, an example is one of those questions, and is not asked.
    part = found["folder part with examples"]
    assert len(part["questions"]) == len(part["examples"]) == 1


def test_folders_of_nq_open_and_bioasq_are_known_too(found: dict[str, Any]) -> None:
    assert [each[1] for each in found["folder nq"]["questions"]] == ["when was the moon landing"]
    assert found["folder nq"]["examples"] == [["Jane Austen", None]]
    bioasq = found["folder bioasq"]
    assert (bioasq["source"]["config"], bioasq["source"]["split"]) == ("question-answer-passages", "test")
    assert len(bioasq["questions"]) == len(bioasq["examples"]) == 1


def test_of_a_folder_with_several_configs_the_known_one_is_read_or_the_named_one(found: dict[str, Any]) -> None:
    assert [each[1] for each in found["folder gsm8k"]["questions"]] == ["1 + 4?"]
    assert found["folder gsm8k"]["examples"] == [["5", "#### 5"]]
    assert [each[1] for each in found["folder socratic"]["questions"]] == ["2 + 3?"]
    assert found["folder several"]["error"] == "MissingQuestions" and "one" in found["folder several"]["said"]
