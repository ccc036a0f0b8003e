"""What is known before a GPU is taken: kept by the run, refused where it is another by now, bad rows listed."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.qa import small_models
from tests.qa.generate.conftest import Begin, answers_of, begin_run

from gpuherd.cli.main import run as gpuherd
from gpuherd.errors import ExitCode, MissingModel, UsageError
from gpuherd.lm.backend import Finish
from gpuherd.models.load import identity
from gpuherd.qa.data.questions import BadQuestions, MissingQuestions
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.generate.experiment import GenerateOutcome, done_lines, plan_lines
from gpuherd.qa.generate.finish import finish
from gpuherd.qa.generate.prepared import begun_record, refuse_other_settings, write
from gpuherd.qa.generate.worker import decoding_of, read_items
from gpuherd.qa.grading.files import JudgeKind
from gpuherd.qa.grading.stage import items_of, judge_by_rule
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.runs import DamagedRun, NewerRun, record_of
from gpuherd.qa.span import is_only_thought
from gpuherd.runs.shards import Damaged


def config(model: Path, dataset: Path, tmp_path: Path, **options: Any) -> GenerateConfig:
    where = {"model": str(model), "dataset": str(dataset), "runs_dir": str(tmp_path / "runs")}
    said: dict[str, Any] = {**where, "max_new_tokens": 8, **options}
    return GenerateConfig(**said)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".jsonl")}


def test_the_record_says_what_the_answers_depend_on(begin: Begin, trained: Path) -> None:
    begun = begin(limit=5, samples=2, run_id="record")
    record = record_of(begun.folder)
    assert record["kind"] == "qa" and record["run_id"] == "record"
    assert record["config"]["samples"] == 2 and record["identity"]["greedy"] is False
    assert record["questions"] == 5 and record["end_tokens"]["ids"] == [1, 6]
    assert record["stop"] == list(begun.prepared.stop) != []
    assert len(record["model_sha256"]) == len(record["prompts_sha256"]) == 64
    assert record["source"]["rows"] == 24 and {"gpuherd", "transformers"} <= record["versions"].keys()
    prompts = [json.loads(line) for line in begun.folder.prompts.read_bytes().splitlines()]
    assert [len(each["token_ids"]) for each in prompts] == list(begun.prepared.lengths)


def test_a_run_goes_on_with_what_it_was_begun_with(begin: Begin) -> None:
    first = begin(limit=20, shards=2, run_id="again")
    before = files_of(first.folder.root)
    again = begin(limit=20, run_id="again")
    assert again.shards == first.shards and again.prepared.lengths == first.prepared.lengths
    assert files_of(first.folder.root) == before
    with pytest.raises(UsageError, match="begun with 2 shards"):
        begin(limit=20, shards=3, run_id="again")


@pytest.mark.parametrize("name", ["questions", "prompts", "refused"])
@pytest.mark.parametrize("left", [None, b"", b'{"id": "fa'])
def test_what_a_killed_start_left_is_made_whole(begin: Begin, name: str, left: bytes | None) -> None:
    """run.json is written first; the rest may be missing or half when a start is killed."""
    begun = begin(limit=4, run_id="killed")
    before = files_of(begun.folder.root)
    path = getattr(begun.folder, name)
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    begin(limit=4, run_id="killed")
    assert files_of(begun.folder.root) == before


def test_data_that_changed_under_a_run_is_refused(trained: Path, questions: Path, tmp_path: Path) -> None:
    data = Path(shutil.copy(questions, tmp_path / "facts.jsonl"))
    begun = begin_run(config(trained, data, tmp_path))
    before = files_of(begun.folder.root)
    data.write_bytes(data.read_bytes().replace(b"France", b"Prussia"))
    with pytest.raises(UsageError, match=r"facts\.jsonl has changed since run \S+ was begun"):
        begin_run(config(trained, data, tmp_path))
    assert files_of(begun.folder.root) == before
    # Another name begins anew.
    assert begin_run(config(trained, data, tmp_path, run_id="other")).prepared.record["questions"] == 24


def test_a_model_that_changed_under_a_run_is_refused(questions: Path, trained: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(trained, tmp_path / "model"))
    begin_run(config(model, questions, tmp_path))
    small_models.random_llama(model, seed=9, tokenizer=False)
    with pytest.raises(UsageError, match="model has changed since run"):
        begin_run(config(model, questions, tmp_path))


def test_a_change_amid_large_weights_is_refused(
    questions: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(trained, tmp_path / "model"))
    with (model / "more.bin").open("wb") as file:
        file.truncate(40 << 20)
    with monkeypatch.context() as earlier:  # a run of a version that read pieces of large files only
        earlier.setattr(identity, "_digest", partial(identity._digest, by_pieces=True))
        begin_run(config(model, questions, tmp_path, run_id="earlier"))
    begin_run(config(model, questions, tmp_path, run_id="now"))
    assert not caplog.records
    begin_run(config(model, questions, tmp_path, run_id="earlier"))
    assert "begun by an earlier gpuherd" in caplog.text
    with (model / "more.bin").open("r+b") as file:
        file.seek((1 << 20) + 100)
        file.write(b"other")
    with pytest.raises(UsageError, match="model has changed since run"):
        begin_run(config(model, questions, tmp_path, run_id="now"))


def test_a_name_belongs_to_its_settings(begin: Begin) -> None:
    begun = begin(run_id="mine", samples=2)
    kept = record_of(begun.folder)
    refuse_other_settings(kept, begun.config)
    other = GenerateConfig(**{**begun.config.to_dict(), "samples": 3, "seed": 4, "stop": ("x",), "gpu_list": ()})
    with pytest.raises(UsageError, match=r"begun with .*--samples 2, not 3") as problem:
        refuse_other_settings(kept, other)
    assert "--seed 0, not 4" in str(problem.value) and "another --run-id" in str(problem.value)


def test_a_run_of_a_newer_version_is_not_gone_on_with(begin: Begin) -> None:
    begun = begin(run_id="new", limit=2)
    begun.folder.run_json.write_text(json.dumps({**record_of(begun.folder), "format": 2}))
    with pytest.raises(NewerRun, match="format 2, of a newer gpuherd"):
        begin(run_id="new", limit=2)


@pytest.mark.parametrize("name", ["questions_sha256", "end_tokens", "refused", "identity"])
def test_a_record_that_lacks_a_part_is_damaged(begin: Begin, name: str) -> None:
    begun = begin(run_id="torn", limit=2)
    record = {**record_of(begun.folder), name: {} if name == "identity" else None}
    begun.folder.run_json.write_text(json.dumps(record))
    lacking = "model" if name == "identity" else name
    with pytest.raises(DamagedRun, match=f"says nothing of {lacking}; remove .*torn to begin anew"):
        begun_record(begun.folder)
    with pytest.raises(DamagedRun, match=f"says nothing of {lacking}"):
        gpuherd(["generate", "--resume=torn", f"--runs-dir={begun.folder.root.parent}"])


def test_how_answers_are_decoded_is_said(begin: Begin) -> None:
    record = dict(record_of(begin(run_id="said", samples=2, limit=2).folder))
    assert decoding_of(record).samples == 2
    for spoilt in ({**record, "end_tokens": {}}, {**record, "identity": {**record["identity"], "samples": "many"}}):
        with pytest.raises(DamagedRun, match="how answers are decoded"):
            decoding_of(spoilt)


def test_another_start_takes_no_file_away(begin: Begin) -> None:
    """Workers of the first start may read the questions while a second one prepares the same run."""
    begun = begin(run_id="both", limit=2)
    missing: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            missing.extend(path.name for path in (begun.folder.questions, begun.folder.prompts) if not path.exists())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(10):
        write(begun.prepared, begun.folder)
    over.set()
    watcher.join()
    assert missing == []


# ---- bad input -------------------------------------------------------------------------------------------------------

HOSTILE = [
    {"question": "What is 4 plus 3?", "answers": ["7"], "id": "good"},
    {"question": "", "answers": ["x"]},
    {"question": "no reference", "answers": []},
    {"question": "an empty one", "answers": [""]},
    {"question": "What is 4 plus 3?", "answers": ["7"]},
    {"question": "twice", "answers": ["a"], "id": "good"},
    {"question": "<script>alert(1)</script>\x00\x1b[31m\u202e", "answers": ["<b>\x07"], "id": "../../etc/passwd"},
    {"question": "Zürich \U0001f600 東京", "answers": ["yes"], "id": "unicode"},
    {"question": "Who is in it?", "answers": ["me"], "context": "long " * 100_000, "id": "long"},
]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.jsonl"
    lines = [json.dumps(row).encode() for row in HOSTILE]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([*lines, b'{"question": "\xff\xfe"}', b"{", b"[1]"]) + b"\n")
    return path


@pytest.mark.parametrize("rule", ["cut", "refuse"])
def test_bad_rows_harm_no_other(hostile: Path, trained: Path, tmp_path: Path, rule: str) -> None:
    begun = begin_run(config(trained, hostile, tmp_path, long_context=rule, batch_size=4, samples=1, greedy=True))
    reasons = {each.row: each.reason for each in begun.prepared.refused}
    assert len(reasons) == 8 + (rule == "refuse")
    assert begun.prepared.cut == (rule == "cut")
    begun.answer()
    run = begun.finish()
    answers = answers_of(run)
    assert [each.question.id for each in answers] == [
        "good",
        "../../etc/passwd",
        "unicode",
        *(["long"] * (rule == "cut")),
    ]
    assert answers[1].question.question == HOSTILE[6]["question"]
    assert (answers[-1].prompt.cut > 90_000) == (rule == "cut")
    assert max(each.prompt.tokens for each in answers) <= 512 - 8
    assert run.done["counts"]["refused"] == len(reasons)
    told = [json.loads(line) for line in begun.folder.refused.read_bytes().splitlines()]
    assert [each["reason"] for each in told] == [each.reason for each in begun.prepared.refused]


def test_data_that_cannot_be_asked(trained: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(BadQuestions, match="empty"):
        begin_run(config(trained, empty, tmp_path))
    with pytest.raises(MissingQuestions):
        begin_run(config(trained, tmp_path / "nowhere.jsonl", tmp_path))
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question": "why " * 3000, "answers": ["x"]}))
    with pytest.raises(BadQuestions, match="no question is left"):
        begin_run(config(trained, long, tmp_path))
    assert not (tmp_path / "runs").exists()


def test_more_new_tokens_than_positions(trained: Path, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="512 positions"):
        begin_run(config(trained, questions, tmp_path, max_new_tokens=512))


def test_a_model_without_a_tokenizer(questions: Path, tmp_path: Path) -> None:
    model = small_models.random_llama(tmp_path / "bare", tokenizer=False)
    with pytest.raises(MissingModel, match="has no tokenizer"):
        begin_run(config(model, questions, tmp_path))
    with pytest.raises(MissingModel):
        begin_run(config(tmp_path / "nothing", questions, tmp_path))


def test_no_pad_token_and_learnt_positions(gpt2: Path, questions: Path, tmp_path: Path) -> None:
    """GPT-2 in batches of unequal prompts answers as one question at a time does."""
    files = []
    for name, options in (("batched", {"batch_size": 8}), ("alone", {"exact": True})):
        begun = begin_run(config(gpt2, questions, tmp_path, limit=9, run_id=name, **options))
        begun.answer()
        files.append(answers_of(begun.finish()))
    for one, other in zip(*files, strict=True):
        assert one.greedy is not None and other.greedy is not None
        assert one.greedy.token_ids == other.greedy.token_ids
        assert one.greedy.log_probs == pytest.approx(other.greedy.log_probs, abs=1e-5)


def test_a_chat_template_is_the_tokenizers_own(chatting: Path, trained: Path, questions: Path, tmp_path: Path) -> None:
    begun = begin_run(config(chatting, questions, tmp_path, limit=2))
    first = json.loads(begun.folder.prompts.read_bytes().splitlines()[0])
    assert "<|user|>" in first["text"] and first["token_ids"].count(0) == 1  # one BOS
    assert begun.prepared.stop == ()
    with pytest.raises(UsageError, match="no chat template"):
        begin_run(config(trained, questions, tmp_path, limit=2, chat="yes"))


def test_logits_that_are_no_numbers(trained: Path, questions: Path, tmp_path: Path) -> None:
    """A model whose head has a NaN: log-probs are None and counted, never 0."""
    import torch
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(trained, tmp_path / "broken"))
    tensors = load_file(model / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in tensors else "model.norm.weight"
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    begun = begin_run(config(model, questions, tmp_path, limit=3))
    begun.answer()
    run = begun.finish()
    found = [each.greedy for each in run.answers()]
    assert all(each is not None and None in (*each.log_probs, each.end_log_prob) for each in found)
    assert all(each is not None and each.finish is Finish.NAN and each.is_nan for each in found)
    assert run.done["counts"]["log_probs_not_finite"] >= 3 and run.done["counts"]["finish"]["nan"] == 3
    assert GenerateOutcome(None, run.done).exit_code is ExitCode.FAILED
    told = "\n".join(done_lines(run.folder, run.done))
    assert "3 at numbers that are not finite (NaN)" in told and "every answer is NaN" in told


def test_a_template_with_thoughts_and_little_room_is_warned_of(chatting: Path, questions: Path, tmp_path: Path) -> None:
    """And answers begin in the thought that it opens, so that none that ends in it is an answer."""
    model = Path(shutil.copytree(chatting, tmp_path / "thinking"))
    template = model / "chat_template.jinja"
    template.write_text(f"{template.read_text()}{{% if add_generation_prompt %}}<think>\n{{% endif %}}")
    begun = begin_run(config(model, questions, tmp_path, limit=2, max_new_tokens=5))
    told = plan_lines(begun.config, begun.prepared, begun.plan.asks, 1, 0)
    assert any("5 tokens may end before a thought does" in line for line in told)
    begun.answer()
    run = begun.finish()
    found = [each.main for each in run.answers()]
    assert all(each.in_thought and is_only_thought(each) for each in found) and run.done["counts"]["only_thought"] == 2
    items, _ = items_of(run.answers(), None)
    assert {each.verdict for each in judge_by_rule(JudgeKind.CONTAINS, items)} == {Verdict.NOT_ATTEMPTED}
    plain = begin_run(config(chatting, questions, tmp_path, limit=2, max_new_tokens=5, run_id="plain"))
    assert not any("may end before" in line for line in plan_lines(plain.config, plain.prepared, plain.plan.asks, 1, 0))


def test_questions_that_are_damaged_are_not_answered(begin: Begin) -> None:
    begun = begin(limit=3, run_id="damaged", shards=1)
    prompts = begun.folder.prompts.read_bytes().splitlines(keepends=True)
    for spoilt in (prompts[:2], [prompts[1], prompts[0], prompts[2]], [*prompts[:2], b"{}\n"], [b"", *prompts[:2]]):
        begun.folder.prompts.write_bytes(b"".join(spoilt))
        with pytest.raises(DamagedRun, match=r"can't be read|has no question"):
            read_items(begun.folder, [0, 1, 2])


def test_what_was_finished_by_a_quicker_start_stays(begin: Begin) -> None:
    begun = begin(limit=3, run_id="twice")
    begun.answer()
    first = begun.finish()
    assert begun.finish().done == first.done  # though the lines of its shards are gone
    # A worker that is started by hand, or late, leaves it as it is.
    before = {path: path.read_bytes() for path in begun.folder.root.rglob("*") if path.is_file()}
    begun.answer()
    assert {path: path.read_bytes() for path in begun.folder.root.rglob("*") if path.is_file()} == before


def test_two_starts_finish_a_run_one_behind_the_other(begin: Begin) -> None:
    """The queue is free when the jobs are done; the first to finish takes the shards' lines away."""
    begun = begin(limit=3, run_id="finishing")
    begun.answer()
    made: list[Any] = []
    other = threading.Thread(target=lambda: made.append(finish(begun.folder, begun.prepared, begun.shards)))
    with begun.folder.plan.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other.start()
        other.join(0.2)
        assert other.is_alive() and not begun.folder.answers.exists()
    other.join()
    assert finish(begun.folder, begun.prepared, begun.shards) == made[0]


def test_what_is_told_of_a_damaged_shard_mends_it_and_leaves_the_others(begin: Begin) -> None:
    undisturbed = begin(limit=6, shards=2, batch_size=1, run_id="undisturbed")
    undisturbed.answer()
    whole = undisturbed.finish().folder.answers.read_bytes()
    begun = begin(limit=6, shards=2, batch_size=1, run_id="damaged")
    begun.answer()
    other, shard, done = begun.folder.shard(0), begun.folder.shard(1), begun.folder.shard_done(1)
    before = other.read_bytes(), other.stat().st_mtime_ns
    flipped = bytearray(shard.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    # A line without a checksum, as versions before wrote it, that is JSON and no record.
    no_record = b"".join([b'{"number": 1}\n', *shard.read_bytes().splitlines(keepends=True)[1:]])
    for spoilt, remedy in ((bytes(flipped), (done,)), (no_record, (shard, done))):
        shard.write_bytes(spoilt)
        with pytest.raises(Damaged) as told:
            begun.finish()
        assert all(str(path) in str(told.value) for path in remedy) and str(other) not in str(told.value)
        for path in remedy:
            path.unlink()
        begun.answer([1])
        assert (other.read_bytes(), other.stat().st_mtime_ns) == before
    assert begun.finish().folder.answers.read_bytes() == whole
