"""The same answers however the work is divided, and to the byte however often it is disturbed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.qa.generate.conftest import Begin, answers_of

from gpuherd.lm.backend import Finish
from gpuherd.qa.record import Answered

SAMPLES = 2


@pytest.fixture
def one_shard(begin: Begin) -> list[Answered]:
    begun = begin(greedy=True, samples=SAMPLES, shards=1, run_id="one")
    begun.answer()
    return answers_of(begun.finish())


def assert_alike(ones: list[Answered], others: list[Answered]) -> None:
    assert [each.question for each in ones] == [each.question for each in others]
    assert [each.prompt for each in ones] == [each.prompt for each in others]
    for one, other in zip(ones, others, strict=True):
        assert one.which.keys() == other.which.keys()
        for which, answer in one.which.items():
            twin = other.which[which]
            assert (answer.token_ids, answer.text, answer.ends, answer.end_id, answer.finish) == (
                (twin.token_ids, twin.text, twin.ends, twin.end_id, twin.finish)
            )
            assert answer.log_probs == pytest.approx(twin.log_probs, abs=1e-5)
            assert answer.end_log_prob == pytest.approx(twin.end_log_prob, abs=1e-5)


def test_any_number_of_shards_gives_the_same_answers(begin: Begin, one_shard: list[Answered]) -> None:
    assert [len(each.which) for each in one_shard] == [1 + SAMPLES] * 24
    assert {answer.finish for each in one_shard for answer in each.which.values()} == {Finish.EOS}
    # Some are right and some wrong, and draws differ from each other and from the greedy answer.
    right = [each.greedy is not None and each.greedy.text.strip() in each.question.answers for each in one_shard]
    assert 5 < sum(right) < 24
    assert any(each.samples[0].token_ids != each.samples[1].token_ids for each in one_shard)
    for shards in (2, 3, 5):
        begun = begin(greedy=True, samples=SAMPLES, shards=shards, run_id=f"shards-{shards}")
        assert len(begun.shards) == shards
        begun.answer()
        assert_alike(one_shard, answers_of(begun.finish()))


def test_any_batch_size_gives_the_same_answers(begin: Begin, one_shard: list[Answered]) -> None:
    for batch_size in (1, 8):
        begun = begin(greedy=True, samples=SAMPLES, shards=1, batch_size=batch_size, run_id=f"batch-{batch_size}")
        begun.answer()
        assert_alike(one_shard, answers_of(begun.finish()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_runs_are_equal_to_the_bit(begin: Begin, dtype: str) -> None:
    """In bf16 batches change answers; one question at a time nothing can."""
    files = []
    for batch_size, shards in ((1, 1), (32, 3)):
        begun = begin(
            samples=1, exact=True, dtype=dtype, limit=9, batch_size=batch_size, shards=shards, run_id=f"b{batch_size}"
        )
        begun.answer()
        files.append(begun.finish().folder.answers.read_bytes())
    assert files[0] == files[1]


def test_more_samples_begin_with_the_same_ones(begin: Begin) -> None:
    few = begin(samples=1, limit=8, run_id="few")
    many = begin(samples=3, limit=8, run_id="many")
    few.answer()
    many.answer()
    for one, other in zip(answers_of(few.finish()), answers_of(many.finish()), strict=True):
        assert one.greedy is None and other.greedy is None
        assert one.samples[0].token_ids == other.samples[0].token_ids


def test_a_run_cut_off_anywhere_equals_an_undisturbed_one(begin: Begin) -> None:
    """What a kill leaves is a beginning of the shard's lines, whole or half; the worker goes on behind it."""
    options = {"greedy": True, "samples": 1, "batch_size": 6, "shards": 2}
    whole = begin(run_id="whole", **options)
    whole.answer()
    lines = [whole.folder.shard(number).read_bytes() for number in range(2)]
    expected = whole.finish().folder.answers.read_bytes()
    chance = random.Random(5)
    for attempt in range(3):
        begun = begin(run_id=f"killed-{attempt}", **options)
        begun.folder.shards.mkdir()
        for number in range(2):
            begun.folder.shard(number).write_bytes(lines[number][: chance.randrange(len(lines[number]))])
        begun.answer()
        assert begun.finish().folder.answers.read_bytes() == expected


def test_stop_strings_end_answers_before_them(begin: Begin) -> None:
    begun = begin(limit=8, shards=1, max_new_tokens=6, stop=("1", "a"), run_id="stops")
    begun.answer()
    found = [answer for each in answers_of(begun.finish()) for answer in each.which.values()]
    assert {Finish.STOP, Finish.EOS} <= {answer.finish for answer in found}
    for answer in found:
        assert "1" not in answer.text and "a" not in answer.text
        assert (answer.end_id is not None) == (answer.finish is Finish.EOS)
        assert "".join(answer.pieces) == answer.text


def test_the_table_has_the_same_numbers(begin: Begin) -> None:
    import numpy as np
    import pyarrow.parquet as pq

    begun = begin(greedy=True, samples=1, limit=8, run_id="table")
    begun.answer()
    run = begun.finish()
    rows = pq.read_table(run.folder.answers_table).to_pylist()
    answers = [(each, which, answer) for each in run.answers() for which, answer in each.which.items()]
    assert len(rows) == len(answers) == 16
    for row, (each, which, answer) in zip(rows, answers, strict=True):
        assert (row["number"], row["id"], row["which"], row["text"]) == (
            (each.number, each.question.id, which, answer.text)
        )
        assert row["token_ids"] == list(answer.token_ids) and row["end_id"] == answer.end_id
        assert np.array_equal(np.array(row["log_probs"], np.float32), np.array(answer.log_probs, np.float32))
        assert row["prompt_sha256"] == each.prompt.sha256


def test_what_was_made_is_counted(begin: Begin, tmp_path: Path) -> None:
    begun = begin(greedy=True, samples=1, limit=8, run_id="counts")
    begun.answer()
    run = begun.finish()
    counts = run.done["counts"]
    answers = [answer for each in run.answers() for answer in each.which.values()]
    assert counts["answers"] == 16 == sum(counts["finish"].values())
    assert counts["tokens"] == sum(len(answer.token_ids) + (answer.end_id is not None) for answer in answers)
    assert run.done["dtype"] == "fp32" and run.done["engine"] == "transformers"
    assert sum(each["tokens"] for each in run.done["shards"]) == counts["tokens"]
    # The lines of the shards were copied, and go.
    assert not list(run.folder.shards.glob("*.jsonl"))
