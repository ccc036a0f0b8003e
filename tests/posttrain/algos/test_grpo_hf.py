"""GRPO-HF learns a proxy of the reward, then raises it; killed, it goes on in the right phase."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain import tiny
from tests.posttrain.algos.test_dpo import reward_of
from tests.posttrain.algos.training_work import curves
from tests.posttrain.preference.vowels import collecting, training

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.grpo_hf import GRPOFromHumanFeedback, LossType, _identity
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.options import Lora, StepOptions, Stopped, Strategy
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.preference.proxy import load_proxy, train_proxy
from gpuherd.posttrain.types import Comparison, Policy, Problem

Options = GRPOFromHumanFeedback.Options


# PEFT asks transformers by a name that is old there.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(folder / "model" / "model.safetensors")
    return found


def proxy_steps(folder: Path) -> int:
    return len(read_curves(folder / "proxy"))


def test_its_name() -> None:
    assert algorithm_class("grpo_hf") is GRPOFromHumanFeedback


@pytest.mark.slow
def test_phases(policy_model: Path, tmp_path: Path) -> None:
    """The proxy is learnt once; a stopped second phase goes on as if it had not been stopped."""
    algorithm = GRPOFromHumanFeedback(Options(lr=1e-3, epochs=2, batch_size=4, proxy_epochs=2, proxy_batch_size=2))
    rows = list(algorithm.collect(collecting(policy_model)))
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    algorithm.train(training(policy_model, rows, whole))
    asked = iter([True, *[False] * (proxy_steps(whole) - 1), False, True])
    hooks = Hooks(save_every=100, stopping=lambda: next(asked))
    with pytest.raises(Stopped, match="stopped after step 1 of "):  # the proxy stops too
        algorithm.train(training(policy_model, rows, halved, extra={"hooks": hooks}))
    with pytest.raises(Stopped, match="stopped after step 2 of 4"):
        algorithm.train(training(policy_model, rows, halved, extra={"hooks": hooks}))
    proxy = (halved / "proxy" / "model" / "model.safetensors").stat().st_mtime_ns
    policy = algorithm.train(training(policy_model, rows, halved))
    assert policy == Policy(str(halved / "model"))
    assert (halved / "proxy" / "model" / "model.safetensors").stat().st_mtime_ns == proxy
    assert all(torch.equal(tensor, weights(halved)[name]) for name, tensor in weights(whole).items())
    one, two = curves(whole), curves(halved)
    assert one == two
    assert {"loss", "kl", "reward", "constant_groups"} <= set(one[0])
    assert one[0]["kl"] == pytest.approx(0, abs=1e-6)


def test_preferences_of_people(policy_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "preferences.jsonl"
    rows = [{"prompt": f"say {n}:", "chosen": "aeiou", "rejected": "xyz"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm = GRPOFromHumanFeedback(
        Options(
            preferences=str(path), batch_size=4, max_steps=1, proxy_epochs=1, kl_coef=0.0, loss_type=LossType.DR_GRPO
        )
    )
    assert list(algorithm.collect(collecting(policy_model))) == []
    algorithm.train(training(policy_model, [], tmp_path / "run"))
    (line,) = read_curves(tmp_path / "run")
    assert "kl" not in line
    work = training(policy_model, [], tmp_path / "run")
    other = [dataclasses.replace(each, prompt=f"{each.prompt} ") for each in work.problems]
    with pytest.raises(UsageError, match="is of another training: its problems is"):
        algorithm.train(dataclasses.replace(work, problems=other))
    with pytest.raises(UsageError, match="is of another training: its sampling is"):
        algorithm.train(dataclasses.replace(work, sampling=dataclasses.replace(work.sampling, temperature=2.0)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_proxy_learns_and_scores_in_float32_whatever_the_policy_is_in(
    policy_model: Path, tmp_path: Path, dtype: str
) -> None:
    rows = [Comparison("p0", (4,), (), (3, 0), (5, 0), "", "")]
    work = training(policy_model, rows, tmp_path)
    work = dataclasses.replace(work, precision=dataclasses.replace(work.precision, dtype=dtype))
    folder = train_proxy(work, rows, Options(proxy_epochs=1))
    assert {each.dtype for each in weights(tmp_path / "proxy").values()} == {torch.float32}
    assert load_proxy(folder, "cpu", 4).module.dtype == torch.float32


def test_what_does_not_go_together(policy_model: Path, tmp_path: Path) -> None:
    algorithm = GRPOFromHumanFeedback(Options(batch_size=9, proxy_epochs=1))
    rows = [Comparison("p0", (4,), (), (3, 0), (5, 0), "", "")]
    with pytest.raises(UsageError, match="batch_size 9 is more than the 8 problems of the round"):
        algorithm.train(training(policy_model, rows, tmp_path / "a"))
    sharded = StepOptions(strategy=Strategy.FSDP)
    with pytest.raises(UsageError, match=r"GRPO-HF samples while it trains, .*; use ddp"):
        algorithm.train(training(policy_model, rows, tmp_path / "b", steps=sharded))


@pytest.mark.slow
def test_a_proxy_with_other_tokens(policy_model: Path, tmp_path: Path) -> None:
    other = tiny.tiny_llama(tmp_path / "other", characters="abc 0123456789:sy")
    algorithm = GRPOFromHumanFeedback(Options(batch_size=4, proxy_epochs=1, max_steps=1, proxy_model=str(other)))
    small = [Comparison("p0", (4,), (), (3, 0), (5, 0), "", "")]
    with pytest.raises(UsageError, match=r"the proxy's tokenizer is another than .*: id \d+ is .* to the policy and"):
        algorithm.train(training(policy_model, small, tmp_path / "c"))


@pytest.mark.parametrize(
    "words", [{"samples_per_prompt": 1}, {"kl_coef": -1.0}, {"proxy_lr": 0.0}, {"proxy_epochs": 0}]
)
def test_bad_options(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(words))):
        Options(**words)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [{}, {"lora": Lora(r=8), "lr": 2e-2}], ids=["weights", "adapter"])
def test_it_learns(words: dict[str, Any], policy_model: Path, tmp_path: Path) -> None:
    """The true reward rises with the proxy's."""
    options = Options(
        **{
            "lr": 3e-3,
            "batch_size": 8,
            "samples_per_prompt": 8,
            "epochs": 40,
            "samples_per_example": 8,
            "proxy_lr": 3e-3,
            "proxy_epochs": 20,
            "kl_coef": 0.0,
            **words,
        }
    )
    algorithm = GRPOFromHumanFeedback(options)
    rows = list(algorithm.collect(collecting(policy_model, 48)))
    policy = algorithm.train(training(policy_model, rows, tmp_path))
    curve = read_curves(tmp_path)
    assert curve[-1]["reward"] > curve[0]["reward"] + 0.5
    assert reward_of(policy) > 2 * reward_of(Policy(str(policy_model)))


@pytest.mark.slow
def test_micro_batches_change_nothing(policy_model: Path, tmp_path: Path) -> None:
    """Draws belong to a problem, a sample and a step: the same whatever is sampled or learnt from together."""
    algorithm = GRPOFromHumanFeedback(Options(lr=1e-3, epochs=2, batch_size=4, proxy_epochs=1))
    rows = list(algorithm.collect(collecting(policy_model)))
    made = tmp_path / "16"
    algorithm.train(training(policy_model, rows, made, steps=StepOptions(micro_batch_size=16)))
    small = tmp_path / "2"
    shutil.copytree(made / "proxy", small / "proxy")
    algorithm.train(training(policy_model, rows, small, steps=StepOptions(micro_batch_size=2)))
    for one, other in zip(read_curves(made), read_curves(small), strict=True):
        for name in ("reward", "length", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3), name


SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.posttrain.algos.training_work import curves
from tests.posttrain.preference.vowels import training
from gpuherd.posttrain.algos.grpo_hf import GRPOFromHumanFeedback
from gpuherd.posttrain.types import Comparison
from gpuherd.posttrain.engine.options import StepOptions
model, folder, rows, strategy = sys.argv[1:]
rows = [Comparison.from_dict(each) for each in json.loads(Path(rows).read_text())]
options = GRPOFromHumanFeedback.Options(lr=1e-3, epochs=2, batch_size=4, proxy_epochs=2, proxy_batch_size=4)
steps = StepOptions(micro_batch_size=4, strategy=strategy)
GRPOFromHumanFeedback(options).train(training(Path(model), rows, Path(folder), steps=steps))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_are_one(policy_model: Path, tmp_path: Path) -> None:
    """Both phases, by gloo: whole groups to each process, and the same draws as one process makes."""
    rows = list(GRPOFromHumanFeedback().collect(collecting(policy_model)))
    (tmp_path / "rows.json").write_text(json.dumps([each.to_dict() for each in rows]))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    for name, strategy, several in (("one", "single", []), ("two", "ddp", torchrun)):
        told = [str(tmp_path / "script.py"), str(policy_model), str(tmp_path / name), str(tmp_path / "rows.json")]
        subprocess.run([sys.executable, *several, *told, strategy], check=True, env=environment)
    for part in ("proxy", "."):
        one, two = (read_curves(tmp_path / name / part) for name in ("one", "two"))
        assert len(one) == len(two)
        assert [line["grad_norm"] for line in one] == pytest.approx([line["grad_norm"] for line in two], rel=2e-3)
    rewards = [[line["reward"] for line in read_curves(tmp_path / name)] for name in ("one", "two")]
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-3)


def test_problems_are_told_apart_as_before_there_were_conversations() -> None:
    """A training that an earlier version began goes on."""
    problem = Problem("p", "q", ("a",), {"x": "y"})
    assert _identity(problem) == {"id": "p", "prompt": "q", "answers": ("a",), "hidden": {"x": "y"}}
    talk = dataclasses.replace(problem, messages=(("system", "s"), ("user", "q")))
    assert _identity(talk) != _identity(problem)
