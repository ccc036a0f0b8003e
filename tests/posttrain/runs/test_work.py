"""A job's work in this process: what is collected resumes exactly and reads back; rows on disk; the reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lm.vllm_stand_in import python_with_vllm
from tests.posttrain import tiny
from tests.posttrain.eval.first_letter import FirstLetter
from tests.posttrain.runs.conftest import MakeSettings
from tests.qa import small_models

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.lm.vllm import PYTHON
from gpuherd.posttrain.algos.sft import SFT
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.eval.results import read_result
from gpuherd.posttrain.preference.tokens import load_tokenizer
from gpuherd.posttrain.runs.folder import (
    RoundsDirectory,
    RunRecord,
    begin,
    read_policy,
    read_record,
    write_policy,
)
from gpuherd.posttrain.runs.plan import Phase, combinations_of
from gpuherd.posttrain.runs.prepare import prepare
from gpuherd.posttrain.runs.settings import Settings, absolute
from gpuherd.posttrain.runs.work import Work, do, rows_of_rounds, run_training, seed_for, step_named, versions
from gpuherd.posttrain.types import BackendName, Policy, Precision, Rollout, Row, Sampling, Training


def begun(settings: Settings, root: Path, places: int = 2) -> tuple[RoundsDirectory, RunRecord]:
    folder = RoundsDirectory(root)
    folder.create()
    record = RunRecord(settings, combinations_of(settings, prepare(settings), places), settings.identity(), "/", {})
    return folder, begin(folder, record)


def work(folder: RoundsDirectory, record: RunRecord, name: str) -> Work:
    return Work(folder, record, step_named(record, name), "cpu")


def test_rows_go_on_exactly_and_read_back_in_order(make_settings: MakeSettings, tmp_path: Path) -> None:
    quiet, record = begun(make_settings(), tmp_path / "quiet")
    killed, again = begun(make_settings(), tmp_path / "killed")
    assert read_record(killed) == again
    for number in range(2):
        name = f"QSharp_sums_tiny_r0_collect_{number}"
        assert do(work(quiet, record, name))["problems_last_start"] == 6
        whole = quiet.rows(quiet.data("QSharp", "sums", "tiny", 0), number).read_bytes()
        path = killed.rows(killed.data("QSharp", "sums", "tiny", 0), number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[: len(whole) * 2 // 3])  # as a kill leaves it
        assert do(work(killed, again, name))["problems_last_start"] == 3
        assert path.read_bytes() == whole
        told = json.loads(killed.rows_done(path.parent, number).read_text())
        assert told["problems"] == 6 and told["rows_last_start"] == 6
    train = work(quiet, record, "QSharp_sums_tiny_r0_train")
    (rows,) = rows_of_rounds(train)
    assert [row.problem for row in rows] == [problem.id for problem in train.problems for _ in range(2)]
    assert all(isinstance(row, Rollout) for row in rows)
    later = work(quiet, record, "QSharp_sums_tiny_r1_collect_0")
    assert later.sampling("round 1").seed != later.sampling("round 0").seed


ALGORITHMS: dict[str, dict[str, Any]] = {
    "QSharp": {"samples_per_example": 2, "epochs": 1},
    "PITA": {"samples_per_example": 2, "epochs": 1},
    "GRPO-HF": {"samples_per_example": 4},
    "GRPO": {"online": False, "samples_per_prompt": 2, "batch_size": 8},
}


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(each, marks=pytest.mark.slow if each in ("PITA", "GRPO-HF") else ()) for each in ALGORITHMS],
)
def test_any_number_of_shards_collects_the_same_to_the_bit(
    make_settings: MakeSettings, tmp_path: Path, algorithm: str
) -> None:
    """The second round too, where a policy guides that the first one's rows have trained."""
    rounds = 2 if algorithm in ("QSharp", "PITA") else 1
    found: dict[int, list[tuple[Row, ...]]] = {}
    for shards in (1, 2, 3, 8):
        settings = make_settings(
            algos={algorithm: ALGORITHMS[algorithm]},
            datasets={"sums": {"task": "arithmetic", "settings": {"digits": 2, "train": 24, "test": 4}}},
            data_collection={"shards": shards, "max_examples": 24},
            generation={"max_new_tokens": 6, "batch_size": 3},
            rounds_of_training=rounds,
        )
        folder, record = begun(settings, tmp_path / str(shards))
        steps = [step for step in record.steps() if step.phase is Phase.COLLECT or step.name.endswith("r0_train")]
        assert sum(step.phase is Phase.COLLECT for step in steps) == shards * rounds
        for step in steps:
            each = Work(folder, record, step, "cpu")
            each.__dict__["task"] = FirstLetter()  # a random model answers some of its questions right
            if step.phase is Phase.COLLECT or (shards == 1 and rounds == 2):
                do(each)
            elif rounds == 2:
                first = RoundsDirectory(tmp_path / "1")
                ours, theirs = (run.policy(run.model(algorithm, "sums", "tiny", 0)) for run in (folder, first))
                ours.parent.mkdir(parents=True)
                write_policy(ours, read_policy(theirs, first.root), folder.root)
        last = work(folder, record, f"{algorithm}_sums_tiny_r{rounds - 1}_train")
        last.__dict__["task"] = FirstLetter()
        found[shards] = rows_of_rounds(last)
    assert len(found[1]) == rounds and all(len(rows) >= 12 for rows in found[1])
    assert all(rows == found[1] for rows in found.values())


def test_a_run_of_a_version_that_dealt_single_problems_goes_on_so(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder, record = begun(make_settings(), tmp_path / "run")
    values = json.loads(folder.run_json.read_bytes())
    del values["divided"]
    for each in values["combinations"]:
        del each["whole_batches"]
    folder.run_json.write_text(json.dumps(values))
    record = read_record(folder)
    for number in range(2):
        do(work(folder, record, f"QSharp_sums_tiny_r0_collect_{number}"))
    train = work(folder, record, "QSharp_sums_tiny_r0_train")
    ids = [problem.id for problem in train.problems]
    path = folder.rows(folder.data("QSharp", "sums", "tiny", 0), 1)
    whole = path.read_bytes()
    assert [json.loads(line.partition(b"\t")[0])["problem"] for line in whole.splitlines()] == ids[1::2]
    path.write_bytes(whole[: len(whole) * 2 // 3])  # as a kill leaves it
    assert do(work(folder, record, "QSharp_sums_tiny_r0_collect_1"))["problems_last_start"] == 3
    assert path.read_bytes() == whole
    (rows,) = rows_of_rounds(train)
    assert [row.problem for row in rows] == [each for each in ids for _ in range(2)]


def test_completions_earn_what_a_function_of_the_users_says(make_settings: MakeSettings, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def score(completions, *, answers):\n    return [len(text) + 0.5 for text in completions]\n")
    sums = {"task": "arithmetic", "settings": {"digits": 1, "train": 12, "test": 4}, "reward": f"{file}:score"}
    settings = make_settings(datasets={"sums": sums})
    folder, record = begun(settings, tmp_path / "run")
    record.made["inputs"] = prepare(settings).inputs  # type: ignore[index]
    do(work(folder, record, "QSharp_sums_tiny_r0_collect_0"))
    path = folder.rows(folder.data("QSharp", "sums", "tiny", 0), 0)
    lines = [line.partition("\t")[0] for line in path.read_text().splitlines()]
    rows = [row for line in lines for row in json.loads(line).get("rows", [])]
    assert len(rows) == 12 and all(row["reward"] == len(row["text"]) + 0.5 for row in rows)
    file.write_text(file.read_text().replace("0.5", "0.25"))
    with pytest.raises(UsageError, match=r"own\.py:score has changed since this run began"):
        do(work(folder, record, "QSharp_sums_tiny_r0_collect_1"))


def test_the_reference_is_evaluated(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder, record = begun(make_settings(), tmp_path / "run")
    do(work(folder, record, "reference_sums_tiny_evaluate"))
    result = read_result(folder.results / "reference" / "tiny" / "sums")
    assert result.about.algorithm == "reference" and result.about.round is None
    assert result.own.metrics.problems == 4 and result.own.metrics.samples == 2
    assert result.policy == Policy(record.settings.models["tiny"].reference).to_dict()


def test_the_reference_is_evaluated_in_shards(make_settings: MakeSettings, tmp_path: Path) -> None:
    evaluation = {"num_samples": 2, "resamples": 100}
    whole, record = begun(make_settings(evaluation=evaluation), tmp_path / "whole")
    do(work(whole, record, "reference_sums_tiny_evaluate"))
    folder, record = begun(make_settings(evaluation={**evaluation, "shards": 3}), tmp_path / "run")
    figures = [do(work(folder, record, f"reference_sums_tiny_evaluate_{number}")) for number in (2, 0, 1)]
    assert [each["problems"] for each in figures] == [1, 2, 1]
    assert not list(folder.results.rglob("result.json"))
    do(work(folder, record, "reference_sums_tiny_evaluate"))
    one, other = (each.results / "reference" / "tiny" / "sums" for each in (whole, folder))
    assert (one / "scores.json").read_bytes() == (other / "scores.json").read_bytes()
    assert read_result(one).own.metrics == read_result(other).own.metrics


def test_a_share_of_answers_is_the_teachers_and_the_policy_comes_nearer(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    teacher = tiny.tiny_llama(tmp_path / "teacher", seed=7)
    told = {"teacher": str(teacher), "on_policy": 0.5, "batch_size": 6, "lr": 5e-3, "epochs": 3}
    settings = make_settings(algos={"Distill": told}, rounds_of_training=1)
    folder, record = begun(settings, tmp_path / "run")
    for shard in range(2):
        do(work(folder, record, f"Distill_sums_tiny_r0_collect_{shard}"))
    do(work(folder, record, "Distill_sums_tiny_r0_train"))
    lines = read_curves(folder.model("Distill", "sums", "tiny", 0))
    assert len(lines) == 6 and lines[-1]["jsd"] < lines[0]["jsd"] and {line["own"] for line in lines} == {0.5}
    do(work(folder, record, "Distill_sums_tiny_r0_evaluate"))


WITH_CALLS = small_models.CHAT_TEMPLATE.replace(
    "<|end|>",
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>",
)


def conversations(count: int) -> list[dict[str, Any]]:
    """Of two answers each, and of every third a call of a tool between them."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {"city": "Rome"}}}]}
    rows = []
    for number in range(count):
        talk = [("user", f"What is {number}?"), ("assistant", "Paris."), ("user", "Sure?"), ("assistant", "Yes.")]
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in talk]
        if number % 3 == 0:
            messages[3:3] = [call, {"role": "tool", "content": "Rome"}]
        rows.append({"id": f"talk {number}", "messages": messages})
    return rows


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_of_several_answers_are_imitated_and_their_last_answers_asked_for(
    make_settings: MakeSettings, tmp_path: Path, packing: bool
) -> None:
    chatting = tmp_path / "chatting"
    small_models.random_llama(chatting, chat=WITH_CALLS)
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in conversations(20)))
    options = {"lr": 5e-3, "epochs": 4, "batch_size": 4, "packing": packing}
    settings = make_settings(
        algos={"SFT": options},
        models={"tiny": {"reference": str(chatting)}},
        datasets={"talks": {"task": str(file)}},
        generation={"max_new_tokens": 4, "batch_size": 3, "use_chat_template": True},
        rounds_of_training=1,
    )
    folder, record = begun(settings, tmp_path / "run")
    for shard in range(2):
        do(work(folder, record, f"SFT_talks_tiny_r0_collect_{shard}"))
    train = work(folder, record, "SFT_talks_tiny_r0_train")
    rows = [each for each in rows_of_rounds(train)[0] if isinstance(each, Rollout)]
    assert len(rows) == len(train.problems) == 16
    tokenizer = load_tokenizer(str(chatting))
    for row in rows:
        learnt = tokenizer.decode([token for token, own in zip(row.ids, row.by_policy, strict=True) if own])
        call = '<tool_call>{"name": "look_up", "arguments": {"city": "Rome"}}</tool_call><|end|>'
        assert learnt in ("Paris.<|end|>Yes.<|end|>", f"Paris.<|end|>{call}Yes.<|end|>")
        assert "What is" in tokenizer.decode(row.prompt_ids) and "Sure?" not in learnt and row.reward == 1
    do(train)
    lines = read_curves(folder.model("SFT", "talks", "tiny", 0))
    assert len(lines) == 16 and lines[-1]["loss"] < lines[0]["loss"] / 2
    do(work(folder, record, "SFT_talks_tiny_r0_evaluate"))
    result = read_result(folder.result("SFT", "tiny", "talks", 0, "talks"))
    assert result is not None and result.own.metrics.problems == 2


def test_conversations_that_can_not_be_trained_on_are_refused_before_anything_starts(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    chatting, file = tmp_path / "chatting", tmp_path / "talks.jsonl"
    small_models.random_llama(chatting, chat=small_models.CHAT_TEMPLATE)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}
    silent = [{"messages": [{"role": "user", "content": f"call {number}"}, call]} for number in range(3)]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in [*silent, *conversations(20)]))

    def prepared(*, template: bool = True, model: Path = chatting, **algos: Any) -> None:
        prepare(
            make_settings(
                algos=algos,
                models={"tiny": {"reference": str(model)}},
                datasets={"talks": {"task": str(file)}},
                generation={"max_new_tokens": 4, "use_chat_template": template},
            )
        )

    prepared(SFT={})
    with pytest.raises(UsageError, match=r"talks: 18 of its problems are .*; set generation.use_chat_template"):
        prepared(SFT={}, template=False)
    with pytest.raises(UsageError, match=r"datasets.talks: .*has no chat template"):
        prepared(SFT={}, model=tiny.tiny_llama(tmp_path / "plain"))
    with pytest.raises(UsageError, match=r"in 3 the assistant calls tools alone: SFT learns .* GRPO can't ask"):
        prepared(SFT={}, GRPO={})
    with pytest.raises(UsageError, match=r"in 3 the assistant calls tools alone.* SFT can't ask"):
        prepared(SFT={"source": "samples"})


def test_callbacks_are_called_in_a_trainings_job(make_settings: MakeSettings, tmp_path: Path) -> None:
    file = tmp_path / "watch.py"
    file.write_text(
        "import pathlib\nclass Watch:\n    def on_end(self, event):\n"
        "        pathlib.Path(__file__).with_suffix('.end').write_text(str(event.path))\n"
    )
    options = {"batch_size": 4, "samples_per_prompt": 2, "max_steps": 1}
    told = make_settings(algos={"GRPO": options}, rounds_of_training=1)
    settings = absolute(replace(told, callbacks=(f"{file}:Watch",)))
    assert settings.identity() == told.identity()  # what comes out is the same
    folder, record = begun(settings, tmp_path / "run")
    assert record.settings.callbacks == (f"{file}:Watch",)
    do(work(folder, record, "GRPO_sums_tiny_r0_train"))
    model = folder.model("GRPO", "sums", "tiny", 0) / "model"
    assert file.with_suffix(".end").read_text() == str(model) and model.is_dir()
    with pytest.raises(UsageError, match=r"callbacks: .*watch.py has no class Wotch; it has Watch"):
        prepare(replace(settings, callbacks=(f"{file}:Wotch",)))


def test_an_algorithm_is_evaluated_as_it_asks(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(algos={"RLCR": {"instruction": " sure?", "batch_size": 6}}, rounds_of_training=1)
    folder, record = begun(settings, tmp_path / "run")
    do(work(folder, record, "RLCR_sums_tiny_r0_train"))
    assert [line["stated"] for line in read_curves(folder.model("RLCR", "sums", "tiny", 0))] == [0, 0]
    do(work(folder, record, "RLCR_sums_tiny_r0_evaluate"))
    do(work(folder, record, "reference_sums_tiny_evaluate"))
    lengths = []
    for name in ("RLCR", "reference"):
        (path,) = (folder.results / name / "tiny" / "sums").rglob("*answers*.jsonl")
        rows = [json.loads(line.partition("\t")[0]) for line in path.read_text().splitlines()]
        lengths.append([len(row["prompt_ids"]) for row in rows])
    assert [more - less for more, less in zip(*lengths, strict=True)] == [len(" sure?")] * 4  # tokens are characters


def test_which_policy_a_step_asks(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder, record = begun(make_settings(rounds_of_training=3, async_rounds=True), tmp_path / "run")
    reference = Policy(record.settings.models["tiny"].reference)
    for number in range(2):
        place = folder.policy(folder.model("QSharp", "sums", "tiny", number))
        place.parent.mkdir(parents=True)
        write_policy(place, Policy(f"trained{number}"), folder.root)
    asked = {
        name: work(folder, record, f"QSharp_sums_tiny_{name}").policy
        for name in ("r0_train", "r1_collect_0", "r2_collect_0", "r2_train", "r1_evaluate")
    }
    assert asked["r0_train"] == asked["r1_collect_0"] == reference
    assert asked["r2_collect_0"].model == "trained0"
    assert asked["r2_train"].model == asked["r1_evaluate"].model == "trained1"


def test_a_job_that_is_none(make_settings: MakeSettings, tmp_path: Path) -> None:
    _, record = begun(make_settings(), tmp_path / "run")
    with pytest.raises(UsageError, match="no job 'x'"):
        step_named(record, "x")


def test_seeds_of_purposes() -> None:
    assert seed_for(1, "round 0") == seed_for(1, "round 0")
    assert len({seed_for(seed, f"round {number}") for seed in range(5) for number in range(20)}) == 100


class Learns(SFT):
    """Trains nothing, and keeps what it was given."""

    def train(self, work: Training) -> Policy:
        self.__dict__["given"] = work
        return Policy("trained")


def test_checkpoints_stay_until_the_end_is_written(policy_model: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    policy, algorithm, ended = Policy(str(policy_model)), Learns(), list[Policy]()
    training = Training(None, (), (), policy, policy, None, tmp_path, 0, Sampling(), Precision(), "cpu")

    def fails(_: Policy) -> None:
        raise CannotWrite("no room")

    with pytest.raises(CannotWrite):
        run_training(algorithm, training, DistEnv.single(), {"policy": policy}, fails)
    assert (tmp_path / "checkpoints").exists()
    run_training(algorithm, training, DistEnv.single(), {"policy": policy}, ended.append)
    assert ended == [Policy("trained")] and not (tmp_path / "checkpoints").exists()
    given = algorithm.__dict__["given"]
    assert given.digests == {"policy": policy.sha256} and given.device == "cpu"


def test_the_version_of_vllm_is_that_of_the_python_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    assert versions(BackendName.HF, BackendName.VLLM)["vllm"] == "0.0.stand-in"
    assert "vllm" not in versions(BackendName.HF) and "torch" in versions()
    monkeypatch.setenv(PYTHON, str(tmp_path / "none"))
    assert "vllm" not in versions(BackendName.VLLM)
