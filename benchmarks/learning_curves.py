"""GRPO and PPO learn by rewards alone: right answers of a tiny model to sums it has not seen, from under .2 to over .9.

    python -m benchmarks learning_curves
    python -m benchmarks.learning_curves                       printed, and a picture beside

The base is a Llama of 0.1 million parameters with a token a character. By next-token training it learns sums of two
numbers of up to two digits, until its likeliest answer is right 19 times in 20; then it imitates labels of which 85 %
are wrong, until its drawn answers are right no more than 15 times in 100. So it is a positive control: somewhere in it
is what rewards are to bring back. It is *not* shown that rewards teach a model to add which never could. From there
GRPO and PPO learn by rewards: 1 for the right number, else 0. What is told is the share of right answers, drawn at
temperature 1, to 500 sums of the test split that no training has seen, with 95 % intervals over sums; and the curve of
the training's own rewards. One process, one thread; CPU seconds.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KNOWN = 0.95  # of 200 held-out sums the base's likeliest answer is right: the first part ends
WRONG_LABELS, SAID = 0.85, 0.15  # of the second part; it ends where no more drawn answers than this are right
SUMS, TEST = 8000, 500
STEPS = {"GRPO": 70, "PPO": 45}


def run(*, quick: bool) -> dict[str, Any]:
    """Rewards of the base and of what GRPO and PPO made of it, CPU seconds, and the curves."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.process_time()
        steps = pretrain(folder / "base")
        told: dict[str, Any] = {"base": {"steps": steps, "cpu_seconds": round(time.process_time() - started, 1)}}
        told["base"] |= told_of(str(folder / "base"))
        for name in ("GRPO", "PPO"):
            told[name] = learnt(name, folder, quick=quick)
    if not quick:
        picture(told, RESULTS / "learning_curves.png")
    return told


def pretrain(folder: Path, seed: int = 0) -> dict[str, int]:
    """Writes the base; the steps of both parts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gpuherd.posttrain.data.arithmetic import make_tokenizer

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    knows = imitated(model, tokenizer, folder, task(), 3e-3, 100, lambda: tested(str(folder), greedy=True) >= KNOWN)
    errs = imitated(model, tokenizer, folder, task(WRONG_LABELS), 2e-4, 5, lambda: tested(str(folder)) <= SAID)
    return {"right_labels": knows, "wrong_labels": errs}


def imitated(
    model: Any, tokenizer: Any, folder: Path, shown: Any, rate: float, every: int, enough: Callable[[], bool]
) -> int:
    """Next-token training on the labels of a task, until that is enough, asked every so many steps; the steps."""
    import torch

    from gpuherd.posttrain.types import Split

    ids, labels = tokens(tokenizer, [(each.prompt, each.answers[0]) for each in shown.problems(Split.TRAIN, SUMS, 0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    drawn = torch.Generator().manual_seed(0)
    most = 1500
    for step in range(1, most + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, step / 50) * 0.5 * (1 + math.cos(math.pi * step / most)) + 1e-5
        rows = torch.randint(len(ids), (256,), generator=drawn)
        loss = model(input_ids=ids[rows], attention_mask=(ids[rows] != 1).long(), labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0:
            model.save_pretrained(folder)
            if enough():
                return step
    raise SystemExit(f"the base is not as it should be after {most} steps")


def tokens(tokenizer: Any, rows: list[tuple[str, str]]) -> tuple[Any, Any]:
    """Ids padded at the right, and labels: the answer and its end alone."""
    import torch

    asked = [tokenizer(prompt)["input_ids"] for prompt, _ in rows]
    said = [[*tokenizer(answer)["input_ids"], 0] for _, answer in rows]
    wide = max(len(one) + len(two) for one, two in zip(asked, said, strict=True))
    ids = [[*a, *b, *[1] * (wide - len(a) - len(b))] for a, b in zip(asked, said, strict=True)]
    labels = [[*[-100] * len(a), *b, *[-100] * (wide - len(a) - len(b))] for a, b in zip(asked, said, strict=True)]
    return torch.tensor(ids), torch.tensor(labels)


def task(wrong_labels: float = 0.0) -> Any:
    """Sums of two numbers of up to two digits. Rewards know nothing of the labels."""
    from gpuherd.posttrain.data.options import TaskOptions
    from gpuherd.posttrain.data.registry import make_task

    return make_task("arithmetic", TaskOptions(settings={"wrong_labels": wrong_labels}))


def sampling(seed: int = 0) -> Any:
    """How answers are drawn: as the policy is."""
    from gpuherd.posttrain.types import Sampling

    return Sampling(max_new_tokens=5, temperature=1.0, batch_size=512, seed=seed)


def tested(model: str, *, greedy: bool = False, test: bool = False) -> float:
    """The share of right answers to 200 held-out sums, or to those of the test."""
    from gpuherd.posttrain.rollout.sampler import Sampler
    from gpuherd.posttrain.types import Policy, Precision, Split

    sampler = Sampler(Policy(model), Precision(), "cpu", sampling(seed=99))
    asked = task().problems(Split.TEST, TEST, 0) if test else task().problems(Split.HELDOUT, 200, 0)
    rollouts = sampler.rollouts(task(), asked, 1, greedy=greedy, reward_batch_size=512)
    return sum(each.reward for each in rollouts) / len(asked)


def told_of(model: str) -> dict[str, float]:
    """The share of right drawn answers to the sums of the test, with its 95 % interval, and of likeliest answers."""
    drawn, likeliest = tested(model, test=True), tested(model, test=True, greedy=True)
    middle, half = wilson(drawn, TEST)
    return {
        "reward": round(drawn, 4), "low": round(middle - half, 4), "high": round(middle + half, 4),
        "greedy": round(likeliest, 4), "sums": TEST,
    }  # fmt: skip


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Middle and half width of Wilson's interval (1927)."""
    scale = 1 + z * z / count
    half = z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5 / scale
    return (share + z * z / (2 * count)) / scale, half


def algorithm(name: str, steps: int) -> Any:
    """GRPO or PPO with the settings of this benchmark: 512 answers a step."""
    from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
    from gpuherd.posttrain.algos.ppo import PPO, PPOOptions
    from gpuherd.posttrain.engine.options import Scheduler

    if name == "GRPO":
        return GRPO(
            GRPOOptions(
                samples_per_prompt=8, batch_size=64, epochs=100, max_steps=steps, minibatch_size=256, num_iterations=2,
                lr=6e-4, scheduler=Scheduler.LINEAR, warmup_steps=10, kl_coef=0.0,
            )
        )  # fmt: skip
    return PPO(
        PPOOptions(
            samples_per_prompt=1, batch_size=512, epochs=100, max_steps=steps, minibatch_size=256, num_ppo_epochs=2,
            lr=5e-4, scheduler=Scheduler.LINEAR, warmup_steps=10, kl_coef=0.0, gamma=1.0, gae_lambda=0.95,
            target_kl=0.1,
        )
    )  # fmt: skip


def learnt(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """What an algorithm made of the base."""
    from gpuherd.posttrain.engine.options import StepOptions
    from gpuherd.posttrain.policy_gradient.algorithm import Hooks
    from gpuherd.posttrain.types import Policy, Precision, Split, Training

    base = Policy(str(folder / "base"))
    steps = 5 if quick else STEPS[name]
    started = time.process_time()
    work = Training(
        task(), task().problems(Split.TRAIN, SUMS, 0), (), base, base, None, folder / name, 0, sampling(), Precision(),
        "cpu", steps=StepOptions(micro_batch_size=512), reward_batch_size=512,
        extra={"hooks": Hooks(save_every=1000)},
    )  # fmt: skip
    policy = algorithm(name, steps).train(work)
    spent = time.process_time() - started
    lines = [json.loads(line) for line in (folder / name / "curves.jsonl").read_text().splitlines()]
    curve = [[line["step"], round(line["reward"], 4)] for line in lines]
    return {**told_of(policy.model), "steps": steps, "cpu_seconds": round(spent, 1), "rewards_by_step": curve}


def picture(told: dict[str, Any], path: Path) -> None:
    """The curves, with the base's reward as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, colour in (("GRPO", "#0072b2"), ("PPO", "#d55e00")):
        steps, rewards = zip(*told[name]["rewards_by_step"], strict=True)
        axes.plot(steps, rewards, color=colour, label=f"{name}, {told[name]['cpu_seconds']:.0f} CPU-s")
    axes.axhline(told["base"]["reward"], color="#777777", linestyle="--", label="base")
    axes.set(xlabel="step of 512 answers", ylabel="right answers", ylim=(0, 1), title="Sums of two numbers")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    print(json.dumps(run(quick=False)))
