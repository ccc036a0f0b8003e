"""Runs of answers as they are on disk when they are complete, and small judges, for the tests of judgings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.qa import small_models
from tests.qa.conftest import made_once
from tests.qa.grading import small_judge

from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.folder import FORMAT, KIND, QADirectory
from gpuherd.qa.record import Answered, Prompted, Question, line_of
from gpuherd.qa.runs import Run, run_of_path


@pytest.fixture(scope="session")
def good_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that tells cities from numbers. Read only."""
    return made_once(tmp_path_factory, "good-judge", small_judge.trained_judge)


@pytest.fixture(scope="session")
def broken_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that always says yes. Read only."""
    return made_once(
        tmp_path_factory, "broken-judge", lambda folder: small_judge.trained_judge(folder, steps=30, always="yes")
    )


@pytest.fixture(scope="session")
def chatting_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and positions enough for our own forms. Read only."""

    def make(folder: Path) -> None:
        small_models.random_llama(folder, chat=small_models.CHAT_TEMPLATE, max_position_embeddings=4096)

    return made_once(tmp_path_factory, "chatting-judge", make)


@pytest.fixture(scope="session")
def short_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The form that both have learnt, as a file."""
    path = tmp_path_factory.mktemp("form") / "form.txt"
    path.write_text(small_judge.FORM)
    return path


def generation(text: str) -> Generation:
    """An answer of one token a character."""
    size = len(text)
    return Generation(tuple(range(size)), (-0.5,) * size, text, tuple(range(1, size + 1)), Finish.EOS, 1, -0.1)


def answered(number: int, question: Question, greedy: str | None, samples: Sequence[str] = ()) -> Answered:
    """A question's answers, by their texts."""
    made = None if greedy is None else generation(greedy)
    return Answered(number, question, Prompted("0" * 64, 3), made, tuple(generation(each) for each in samples))


def write_run(root: Path, rows: Sequence[Answered]) -> Run:
    """A complete run with these answers."""
    folder = QADirectory(root)
    folder.root.mkdir(parents=True)
    data = "".join(f"{line_of(row)}\n" for row in rows).encode()
    folder.answers.write_bytes(data)
    record = {"format": FORMAT, "kind": KIND, "run_id": root.name, "config": {"model": "m"}, "identity": {}}
    folder.run_json.write_text(json.dumps(record))
    done = {
        "format": FORMAT,
        "questions": len(rows),
        "answers_sha256": hashlib.sha256(data).hexdigest(),
        "answers_bytes": len(data),
    }
    folder.done.write_text(json.dumps(done))
    return run_of_path(root)


def capitals_run(root: Path, *, samples: bool = True) -> Run:
    """Capitals: every third answer is a number, one is empty, one says that it doesn't know; three samples each, two
    of them the same."""
    rows = []
    for number, (question, answer) in enumerate(small_judge.capitals()[:24]):
        asked = Question(f"capital-{number}", question, (answer,))
        wrong = small_judge.wrong_answer(number)
        greedy = wrong if number % 3 == 0 else f" {answer}"
        if number == 4:
            greedy = "  "
        if number == 5:
            greedy = "I don't know."
        rows.append(answered(number, asked, greedy, (answer, wrong, answer) if samples else ()))
    return write_run(root, rows)


@pytest.fixture
def capitals(tmp_path: Path) -> Run:
    """A run of 24 capitals, in ``<tmp>/runs/capitals``."""
    return capitals_run(tmp_path / "runs" / "capitals")
