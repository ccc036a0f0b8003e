"""Runs for the tests of evaluations: answers, a judging and a scoring on disk as the commands write them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.qa.grading.judgings import make_judging

from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.folder import FORMAT, KIND, QADirectory
from gpuherd.qa.grading.files import JudgingMeta
from gpuherd.qa.measures.evidence import Evidence, answer_of
from gpuherd.qa.measures.registry import ScoreTable, compute, measure_named
from gpuherd.qa.record import Answered, Prompted, Question, line_of
from gpuherd.qa.scoring.files import ScoredMeasure, ScoringMeta, write_scoring

END = 2
MEASURES = ("nll", "ln-nll", "perplexity")


def right_ones(n: int, wrong: int) -> str:
    """Labels as letters: so many wrong among n, evenly spread."""
    places = {round(at * n / wrong) for at in range(wrong)} if wrong else set()
    return "".join("-" if number in places else "+" for number in range(n))


def make_run(runs_dir: Path, labels: str, *, run_id: str = "made", greedy: bool = True, seed: int = 0) -> QADirectory:
    """A complete run: the right answers are the references, and the wrong ones are less probable by the token."""
    folder = QADirectory(runs_dir / run_id)
    folder.root.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    answers = [_answered(number, label, greedy, draw) for number, label in enumerate(labels)]
    data = "".join(line_of(each) + "\n" for each in answers).encode()
    folder.answers.write_bytes(data)
    config = {"model": "made/model", "dataset": "made.jsonl", "samples": 0}
    record = {"format": FORMAT, "kind": KIND, "run_id": run_id, "config": config, "identity": {}, "started": "2026"}
    done = {
        "format": FORMAT,
        "answers_sha256": hashlib.sha256(data).hexdigest(),
        "answers_bytes": len(data),
        "questions": len(answers),
    }
    folder.run_json.write_text(json.dumps(record))
    folder.done.write_text(json.dumps(done))
    return folder


def _answered(number: int, label: str, greedy: bool, draw: np.random.Generator) -> Answered:
    reference = f"answer {number}"
    text = reference if label == "+" else "" if label == "0" else "something else"
    tokens = text.split()
    pieces = tokens[:1] + [f" {each}" for each in tokens[1:]]
    scale = 0.3 if label == "+" else 0.6
    generation = Generation(
        token_ids=tuple(range(10, 10 + len(pieces))),
        log_probs=tuple(float(np.float32(-draw.exponential(scale))) for _ in pieces),
        text=text,
        ends=tuple(int(end) for end in np.cumsum([len(each) for each in pieces])),
        finish=Finish.EOS,
        end_id=END,
        end_log_prob=float(np.float32(-draw.exponential(0.05))),
    )
    question = Question(f"q{number}", f"question {number}?", (reference,))
    only = (generation, ()) if greedy else (None, (generation,))
    return Answered(number, question, Prompted("0" * 64, 3), *only)


def sha256_of(folder: QADirectory) -> str:
    """The digest that done.json says."""
    return str(json.loads(folder.done.read_bytes())["answers_sha256"])


def judge(folder: QADirectory, letters: str, name: str = "exact-00000000", **meta: Any) -> JudgingMeta:
    """A judging of these verdicts (+ - 0 ?), of this run's answers."""
    return make_judging(folder, letters, name=name, answers_sha256=sha256_of(folder), **meta)


def score(
    folder: QADirectory,
    measures: Sequence[str] = MEASURES,
    *,
    name: str = "5c04e5aa",
    eos: str = "include",
    made: str = "2026-01-01",
    extra: Mapping[str, Sequence[float | None]] | None = None,
    **changes: Any,
) -> ScoringMeta:
    """A scoring by our own measures; ``extra``: columns besides."""
    from gpuherd.qa.runs import run_of_path

    answers = list(run_of_path(folder.root).answers())
    scores = compute(
        measures, [Evidence(each.question.id, greedy=answer_of(each.main, eos == "include")) for each in answers]
    )
    columns = dict(scores.columns) | {key: tuple(column) for key, column in (extra or {}).items()}
    undefined = dict(scores.undefined) | {
        key: {"made so": missing} if (missing := sum(each is None for each in column)) else {}
        for key, column in (extra or {}).items()
    }
    described = tuple(
        ScoredMeasure(
            key,
            measure_named(key).source if key in scores.columns else "made",
            ("greedy",),
            len(answers) - sum(undefined[key].values()),
            undefined[key],
        )
        for key in columns
    )
    values: dict[str, Any] = {"answers_sha256": sha256_of(folder)} | changes
    meta = ScoringMeta(
        name=name, eos=eos, statistics={}, measures=described, questions=len(answers), made=made, **values
    )
    return write_scoring(folder, meta, ScoreTable(scores.ids, columns))
