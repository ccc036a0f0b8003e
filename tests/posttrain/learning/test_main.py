"""The program that trains, on a tiny model: whole trainings, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lm.vllm_stand_in import processes, python_with_vllm

from gpuherd.errors import ExitCode
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.lm.vllm import PYTHON
from gpuherd.posttrain.algos.registry import algorithms
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.learning.__main__ import main
from gpuherd.posttrain.learning.prepare import begin
from gpuherd.posttrain.learning.settings import read_settings
from gpuherd.posttrain.runs.folder import TrainDirectory

SUMS = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(12)]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A training listens to signals; the tests go on with their own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def written(tmp_path: Path, policy: Path, algorithm: str = "grpo", **blocks: Any) -> list[str]:
    """The words that train so, of a file that lies in the folder."""
    training = {
        "algorithm": algorithm,
        "num_iterations": 4,
        "num_rollouts_per_iteration": 8,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "save_every": 2,
        "eval_every": 2,
        "eval_episodes": 1,
        **blocks.pop("training", {}),
    }
    model_block = {
        "model_name_or_path": str(policy),
        "max_new_tokens": 4,
        "torch_dtype": "float32",
        **blocks.pop("model", {}),
    }
    config = {"training": training, "model": model_block, **blocks}
    file = tmp_path / f"{algorithm}.yaml"
    file.write_text(json.dumps(config))
    return ["--config", str(file), "--output", str(tmp_path / algorithm), "--device", "cpu"]


ENV = {"env_type": "math", "problems": SUMS, "settings": {}}


def test_a_training_from_its_file_to_its_model(
    tmp_path: Path, policy_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = written(tmp_path, policy_model, policy_env=ENV, eval_envs=[ENV, ENV], grpo={"gamma": 0.5})
    assert main(words) == ExitCode.OK
    folder = TrainDirectory(tmp_path / "grpo")
    assert (folder.model / "model.safetensors").exists() and not folder.checkpoints.exists()
    lines = read_curves(folder.root)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in ("eval/math/reward", "eval/math-2/reward"):
        assert [name in line for line in lines] == [False, True, False, True]
    summary = folder.summary()
    assert summary is not None and (summary["steps"], summary["processes"], summary["strategy"]) == (4, 1, "single")
    assert summary["policy"]["model"] == str(folder.model)
    assert "GPU Memory Summary:" in folder.run_log.read_text()
    # Again: refused, or seen to be over.
    assert main(words) == ExitCode.USAGE
    assert main([*words, "--resume"]) == ExitCode.OK
    said = capsys.readouterr()
    assert "a training has ended here" in said.err and "nothing is left to do" in said.out


def test_a_training_by_a_reward_of_ones_own_goes_on_after_its_death_as_if_it_had_lived(
    tmp_path: Path, policy_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = tmp_path / "dies"
    (tmp_path / "own.py").write_text(
        "import os\nfrom pathlib import Path\ncalls = 0\n"
        "def score(completions, *, ids, **columns):\n"
        "    global calls\n    calls += 1\n    print('scored', len(completions))\n"
        f"    if calls > 4 and Path({str(dies)!r}).exists(): os._exit(9)\n"
        "    return [len(text) - len(which) / 10 for text, which in zip(completions, ids)]\n"
        "def wrong(completions):\n    return [float('inf')] * len(completions)\n"
    )
    env = {"dataset": "arithmetic", "settings": {"digits": 1}, "reward": f"{tmp_path}/own.py:score"}
    curves = []
    for name in ("whole", "broken"):
        place = tmp_path / name
        place.mkdir()
        words = written(place, policy_model, policy_env=env, training={"save_every": 1, "eval_every": 0})
        if name == "broken":
            dies.touch()
            assert main(words) == ExitCode.FAILED
            assert "its process ended with exit code 9; it must return a list with one finite" in capfd.readouterr().err
            dies.unlink()
            words += ["--resume"]
        assert main(words) == ExitCode.OK
        curves.append([{**line, "seconds": 0} for line in read_curves(place / "grpo")])
    assert curves[0] == curves[1] and len(curves[0]) == 4
    told = capfd.readouterr()
    assert "scored 8" in told.err and "scored" not in told.out
    wrong = written(tmp_path, policy_model, policy_env={**env, "reward": f"{tmp_path}/own.py:wrong"})
    assert main(wrong) == ExitCode.BAD_INPUT
    assert "it returned inf as a reward; it must return" in capfd.readouterr().err


def test_bad_input_is_refused_before_anything_is_loaded(
    tmp_path: Path, policy_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == ExitCode.USAGE
    assert main(written(tmp_path, policy_model, training={"seed": "x"})) == ExitCode.USAGE
    words = written(tmp_path, policy_model, policy_env=ENV)
    (tmp_path / "grpo").mkdir()
    lock = DispatcherLock(TrainDirectory(tmp_path / "grpo").train_lock)
    assert main(words) == ExitCode.BUSY
    lock.close()
    more = written(tmp_path, policy_model, policy_env=ENV, training={"num_rollouts_per_iteration": 64})
    assert main(more) == ExitCode.USAGE
    assert main([*more, "--device", "cuda"]) == ExitCode.USAGE
    assert not TrainDirectory(tmp_path / "grpo").config.exists()
    said = capsys.readouterr().err
    assert "--config FILE is missing" in said and "training.seed=x" in said and "another gpuherd" in said
    assert "asks for 16 problems a step, and there are" in said


def test_what_nobody_expected_is_in_the_log(
    tmp_path: Path, policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("a bug of mine")

    monkeypatch.setattr("gpuherd.posttrain.learning.__main__.train", breaks)
    assert main(written(tmp_path, policy_model, policy_env={"env_type": "math", "problems": SUMS})) == ExitCode.FAILED
    assert "RuntimeError: a bug of mine" in (tmp_path / "grpo/run.log").read_text()


def test_what_is_asked_to_stop_ends_behind_a_checkpoint_and_goes_on_exactly(
    tmp_path: Path, policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for folder in (whole, halved):
        folder.mkdir()
    training = {"num_iterations": 3}
    assert main(written(whole, policy_model, policy_env=ENV, training=training)) == ExitCode.OK
    words = written(halved, policy_model, policy_env=ENV, training=training)
    # Whoever started us has gone away: noticed after the first step.
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as starter:
        os.waitid(os.P_PID, starter.pid, os.WEXITED | os.WNOWAIT)  # its number is nobody else's meanwhile
        monkeypatch.setenv("GPUHERD_TRAIN_STARTER", str(starter.pid))
        assert main(words) == ExitCode.INTERRUPTED
    assert len(read_curves(halved / "grpo")) == 1
    # Whoever started us has asked while we were being loaded.
    monkeypatch.setenv("GPUHERD_TRAIN_STARTER", str(os.getpid()))
    TrainDirectory(halved / "grpo").stop.touch()
    assert main([*words, "--resume"]) == ExitCode.INTERRUPTED
    assert len(read_curves(halved / "grpo")) == 2
    monkeypatch.delenv("GPUHERD_TRAIN_STARTER")
    assert main([*words, "--resume"]) == ExitCode.OK
    for one, other in zip(read_curves(whole / "grpo"), read_curves(halved / "grpo"), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    weights = [(folder / "grpo/model/model.safetensors").read_bytes() for folder in (whole, halved)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_answers_in_several_turns_while_it_trains(
    tmp_path: Path, policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for vLLM, which starts once: with room for a whole episode."""
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    model, training = {"generation_backend": "vllm"}, {"num_iterations": 2, "eval_every": 2}
    words = written(tmp_path, policy_model, policy_env=ENV, eval_envs=[ENV], model=model, training=training)
    assert main(words) == ExitCode.OK
    folder = TrainDirectory(tmp_path / "grpo")
    lines = read_curves(folder.root)
    assert [line["sampler_weight_max"] for line in lines] == pytest.approx([1, 1], abs=1e-3)
    assert "eval/math/reward" in lines[-1] and "starts again" not in folder.run_log.read_text()
    assert not processes(os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_learnt_from_is_drawn_by_vllm_before(
    tmp_path: Path, policy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    drawn = {}
    for backend in ("hf", "vllm"):
        (tmp_path / backend).mkdir()
        words = written(
            tmp_path / backend,
            policy_model,
            "sft",
            policy_env=ENV,
            sft={"max_trajectories": 8},
            model={"generation_backend": backend},
        )
        assert main(words) == ExitCode.OK
        drawn[backend] = TrainDirectory(tmp_path / backend / "sft").rows.read_text()
    assert drawn["hf"].count("\n") == drawn["vllm"].count("\n") == 8 and drawn["hf"] != drawn["vllm"]
    assert not processes(os.getpid())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_is_told_before_anything_is_begun(
    tmp_path: Path, policy_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    words = written(tmp_path, policy_model, policy_env=ENV, model={"generation_backend": "vllm"})
    assert main(words) != ExitCode.OK
    assert "model.generation_backend=vllm: vLLM can't be imported (it is not installed)" in capsys.readouterr().err
    assert not (tmp_path / "grpo").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
def test_all_algorithms_and_both_kinds_of_data(tmp_path: Path, policy_model: Path) -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(12)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    one_turn = {**ENV, "max_attempts": 1}
    lora = {"use_lora": True, "lora_r": 2, "lora_target_modules": ["q_proj"], "gradient_checkpointing": True}
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "ppo": ("ppo", {"policy_env": ENV, "ppo": {"kl_coef": 0.1, "target_kl": 10.0}}),
        "ppo-lora": ("ppo", {"policy_env": ENV, "ppo": {"kl_coef": 0.1}, "model": lora}),
        "dpo-file": ("dpo", {"training": {"data_file": str(file)}, "eval_envs": [one_turn]}),
        "dpo-env": ("dpo", {"policy_env": one_turn}),
        "sft-file": ("sft", {"training": {"data_file": "arithmetic", "max_problems": 8}, "eval_envs": [one_turn]}),
        "sft-env": ("sft", {"policy_env": ENV, "sft": {"max_trajectories": 8, "mode": "combined"}}),
    }
    for name, (algorithm, blocks) in runs.items():
        place = tmp_path / name
        place.mkdir()
        assert main(written(place, policy_model, algorithm, **blocks)) == ExitCode.OK, name
        folder = TrainDirectory(place / algorithm)
        lines = read_curves(folder.root)
        assert [line["step"] for line in lines] == [1, 2, 3, 4], name
        assert ("eval/math/reward" in lines[-1]) == ("eval_envs" in blocks), name
        kind = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
        assert (folder.model / kind).exists(), name


@pytest.mark.timeout(300)
def test_what_registers_itself_is_trained(tmp_path: Path, policy_model: Path) -> None:
    """Algorithms of rounds that no part of this command names, each with an option of its own."""
    sums = {"dataset": "arithmetic", "settings": {"digits": 1}}
    blocks: dict[str, dict[str, Any]] = {
        "rloo": {"kl_coef": 0.0},
        "reinforce": {"baseline": "batch_mean", "greedy": True},
        "rlcr": {"instruction": "=", "group_size": 2},
        "distill": {"teacher": str(policy_model), "on_policy": 0.5, "beta": 1.0},
        "grpo-hf": {"proxy_epochs": 1, "samples_per_prompt": 2},
    }
    (tmp_path / "own.py").write_text("def longest(completions):\n    return [len(set(text)) for text in completions]\n")
    names = {each.name.lower() for each in algorithms().values() if not each.guided}
    assert names == {*blocks, "grpo", "ppo", "dpo", "sft"}, "give the new one a line here"
    for name, block in blocks.items():
        place = tmp_path / name
        place.mkdir()
        training: dict[str, Any] = {"num_iterations": 2, "num_rollouts_per_iteration": 4, "max_problems": 4}
        if name in ("reinforce", "grpo-hf"):
            training["batch_size"] = 4
        pays = {"reward": f"{tmp_path}/own.py:longest"} if name == "grpo-hf" else {}  # so that there is what to compare
        told = {"policy_env": {**sums, **pays}, "eval_envs": [sums], name: block}
        words = written(place, policy_model, name, training=training, **told)
        assert main(words) == ExitCode.OK, name
        folder = TrainDirectory(place / name)
        lines = read_curves(folder.root)
        assert [line["step"] for line in lines] == [1, 2] and "eval/arithmetic/accuracy" in lines[-1], name
        assert (folder.model / "model.safetensors").exists(), name
        assert folder.rows.exists() == (name in ("distill", "grpo-hf")), name
        marks = {"rlcr": "stated", "distill": "own"}
        assert name not in marks or marks[name] in lines[-1]


def test_what_asks_in_its_own_way_takes_single_answers(
    tmp_path: Path, policy_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for algorithm, told in (
        ("grpo-hf", "policy_env: grpo-hf compares single answers, and an episode of math has up to 2 turns"),
        ("rlcr", "policy_env: RLCR pays for answers that are right, and the task math knows no right and wrong"),
    ):
        words = written(tmp_path, policy_model, algorithm, policy_env=ENV, training={"batch_size": 8})
        assert main(words) == ExitCode.USAGE
        assert told in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
def test_sft_learns_from_rows_of_text_and_says_of_how_many(tmp_path: Path, policy_model: Path) -> None:
    file = tmp_path / "texts.jsonl"
    rows = [{"text": f"{n}+1={n + 1}"} for n in range(9)] + [{"prompt": "9+1=", "completion": "10"}]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    training = {"data_file": str(file), "num_iterations": 2}
    assert main(written(tmp_path, policy_model, "sft", training=training)) == ExitCode.OK
    folder = TrainDirectory(tmp_path / "sft")
    assert [line["step"] for line in read_curves(folder.root)] == [1, 2]
    assert f"learning from {file}: 10 answers of 10 of 10 rows" in folder.run_log.read_text()


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_what_was_killed_while_it_collected_goes_on_there(
    tmp_path: Path, policy_model: Path, algorithm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also a folder of an earlier version, which kept its rows in another form, and when all were there."""
    dies, calls = tmp_path / "dies", tmp_path / "calls"
    samples = {"sft": 1, "dpo": 2}[algorithm]
    (tmp_path / "own.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def score(completions, *, ids, **columns):\n"
        f"    dies, calls = Path({str(dies)!r}), Path({str(calls)!r})\n"
        f"    if len(completions) == {4 * samples}:\n"  # those of a batch, and not of a check
        "        calls.open('a').write('.')\n"
        "        if calls.stat().st_size == 2 and dies.exists(): os._exit(9)\n"
        "    return [len(set(text)) + len(which) / 10 for text, which in zip(completions, ids)]\n"
    )
    told: dict[str, Any] = {
        "policy_env": {"dataset": "arithmetic", "settings": {"digits": 1}, "reward": f"{tmp_path}/own.py:score"},
        algorithm: {"sft": {"max_trajectories": 8}, "dpo": {"samples_per_prompt": 2}}[algorithm],
        "training": {"eval_every": 0, "max_problems": 8, "num_iterations": 3, "save_every": 1},
        "model": {"generation_batch_size": 4},
    }
    curves, files = list[list[dict[str, Any]]](), list[bytes]()
    for name, batches in {"whole": 2, "broken": 1, "earlier": 0}.items():
        place = tmp_path / name
        place.mkdir()
        words = written(place, policy_model, algorithm, **json.loads(json.dumps(told)))
        folder = TrainDirectory(place / algorithm)
        calls.write_text("")
        if name == "broken":
            dies.touch()
            assert main(words) == ExitCode.FAILED
            assert "ended with exit code 9" in capfd.readouterr().err
            dies.unlink()
            assert len(folder.rows.read_bytes().splitlines()) == 4
            calls.write_text("")
            words += ["--resume"]
        elif name == "earlier":
            begin(folder, read_settings(words[1]), resume=False)
            lines = [json.loads(line.partition(b"\t")[0])["rows"] for line in files[0].splitlines()]
            rollouts = [{key: row[key] for key in row if key != "kind"} for rows in lines for row in rows]
            folder.rows.write_text("".join(f"{json.dumps(each)}\n" for each in rollouts))
            words += ["--resume"]
        assert main(words) == ExitCode.OK
        assert len(calls.read_text()) == batches, name
        files.append(folder.rows.read_bytes())
        curves.append([{**line, "seconds": 0} for line in read_curves(folder.root)])
    assert curves[0] == curves[1] == curves[2] and len(curves[0]) == 3
    assert files[0] == files[1] != files[2]


def test_answers_to_other_problems_are_not_learnt_from(
    tmp_path: Path, policy_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"id": "a{n}", "question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(12)))
    told: dict[str, Any] = {
        "policy_env": {"env_type": "math", "dataset": str(file)},
        "training": {"eval_every": 0, "num_iterations": 1},
        "sft": {"max_trajectories": 8},
    }
    words = written(tmp_path, policy_model, "sft", **told)
    assert main(words) == ExitCode.OK
    folder = TrainDirectory(tmp_path / "sft")
    folder.done.unlink()
    file.write_text(file.read_text().replace('"id": "a', '"id": "b'))
    assert main([*words, "--resume"]) == ExitCode.USAGE
    assert "has the answers to other problems than policy_env has now" in capsys.readouterr().err


def test_an_abort_at_the_very_end_of_one_of_several_processes_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    words = [sys.executable, "-m", "gpuherd.posttrain.learning", "--output", str(tmp_path / "none")]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    for more, code in (({}, -signal.SIGABRT), ({"RANK": "1"}, ExitCode.USAGE)):
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths, **more}, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "error: " in done.stderr
