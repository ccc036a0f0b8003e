"""A step of GRPO, sampling and update: ours against TRL's GRPOTrainer, on the same model, prompts and settings.

    python -m benchmarks.posttrain grpo     about three minutes; writes results/posttrain.json and the documents' table

A Llama of random weights (3 million parameters besides those of its tokens) answers prompts of 32 tokens with 24
tokens each: no end token is drawn, so that both do the same work. Once with 4,096 tokens, where much of a step is
spent on logits, and once with 45, where nearly nothing is. 8 prompts of 8 answers a step, one update, AdamW, with
and without the divergence from a reference. Both run in this process by turns, a step of one and then a step of the
other; told are the median CPU seconds of a step and of its stages (sampling with rewards, reference, update). One
thread.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARIES = (4096, 45)
PROMPTS, GROUP, PROMPT, NEW = 8, 8, 32, 24
STEPS = 7  # the first two of each are left out: they warm up


def run(*, quick: bool) -> dict[str, Any]:
    """CPU seconds a step of both, by stage, and ours over TRL's."""
    import torch

    torch.set_num_threads(1)
    steps = 4 if quick else STEPS
    return {
        "setting": {
            "prompts": PROMPTS, "group": GROUP, "prompt_tokens": PROMPT, "new_tokens": NEW, "steps": steps - 2,
        },
        **{
            f"vocabulary_{size}": {
                "without_reference": measured(size, 0.0, steps, quick=quick),
                "with_reference": measured(size, 0.05, steps, quick=quick),
            }
            for size in VOCABULARIES
        },
    }  # fmt: skip


def measured(vocabulary: int, kl_coef: float, steps: int, *, quick: bool) -> dict[str, Any]:
    """Both ways by turns, on a model of so many tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, asked = write_model(folder / "model", vocabulary, quick=quick), prompts(vocabulary)
        ours = Ours(model, asked, folder / "ours", kl_coef, steps)
        theirs = Trl(model, asked, folder / "trl", kl_coef, steps)
        for turn in range(steps):
            for way in (ours, theirs) if turn % 2 else (theirs, ours):
                way.step()
        both = {way.name: way.clock.told() for way in (ours, theirs)}
        return {**both, "ours_over_trl": round(both["ours"]["step"] / both["trl"]["step"], 3)}


def write_model(folder: Path, size: int, *, quick: bool) -> Path:
    """A Llama of random weights whose tokenizer has a word a token; its end token is never drawn."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, size)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    width = 64 if quick else 256
    config = LlamaConfig(
        vocab_size=size, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        # One channel that all tokens bring and nothing writes to: by it the end token is made impossible.
        module.model.embed_tokens.weight[:, 0] = 1.0
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        module.lm_head.weight[:, 0] = 0.0
        module.lm_head.weight[1, 0] = -1000.0
    module.save_pretrained(folder)
    return folder


def prompts(vocabulary: int) -> list[str]:
    """Their texts: words by number."""
    return [
        " ".join(f"w{2 + (7919 * row + 31 * place) % (vocabulary - 2)}" for place in range(PROMPT))
        for row in range(PROMPTS)
    ]


def reward(completion: str) -> float:
    """The share of words of even number."""
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


@dataclass
class Clock:
    """CPU seconds of stages, step by step."""

    steps: list[dict[str, float]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds what the block takes to a stage of the step."""
        started = time.process_time()
        try:
            yield
        finally:
            here = self.steps[-1]
            here[name] = here.get(name, 0.0) + time.process_time() - started

    def timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed as a stage."""

        def timed(*args: Any, **words: Any) -> Any:
            with self.stage(name):
                return call(*args, **words)

        return timed

    def told(self) -> dict[str, float]:
        """The median of each stage, and of the whole step, without the first two steps."""
        kept = self.steps[2:]
        names = list(dict.fromkeys(name for each in kept for name in each))
        return {name: round(statistics.median(each.get(name, 0.0) for each in kept), 4) for name in names}


class Ours:
    """A trainer of ``gpuherd.posttrain`` that is advanced a step at a time."""

    name = "ours"

    def __init__(self, model: Path, prompts: Sequence[str], folder: Path, kl_coef: float, steps: int):
        from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
        from gpuherd.posttrain.engine.options import StepOptions
        from gpuherd.posttrain.policy_gradient.algorithm import Hooks
        from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer
        from gpuherd.posttrain.types import Policy, Precision, Problem, Sampling, Training

        self.clock = Clock()
        options = GRPOOptions(
            samples_per_prompt=GROUP, batch_size=PROMPTS, epochs=steps, kl_coef=kl_coef, lr=1e-5,
        )  # fmt: skip
        policy = Policy(str(model))
        work = Training(
            _Words(), [Problem(str(number), text) for number, text in enumerate(prompts)], (), policy, policy, None,
            folder, 0, Sampling(max_new_tokens=NEW, batch_size=PROMPTS * GROUP), Precision(), "cpu",
            steps=StepOptions(micro_batch_size=PROMPTS * GROUP), extra={"hooks": Hooks(save_every=1 << 30)},
        )  # fmt: skip
        trainer = RolloutTrainer(work, options, "GRPO", **GRPO(options).learning(work))
        for stage, target in (("sampling", "rollouts"), ("reference", "ref_logprobs")):
            setattr(trainer, target, self.clock.timing(stage, getattr(trainer, target)))
        trainer.trainee.step = self.clock.timing("update", trainer.trainee.step)  # type: ignore[method-assign]
        self._trainer, self._turns = trainer, self._turning(GRPO(options), trainer)

    def _turning(self, algorithm: Any, trainer: Any) -> Iterator[None]:
        """The algorithm's own loop, held after each step: run in a thread of its own that waits between them."""
        import threading

        go, done = threading.Semaphore(0), threading.Semaphore(0)
        finish = trainer.finish

        def finished(*args: Any) -> None:
            finish(*args)
            done.release()
            go.acquire()

        trainer.finish = finished

        def loop() -> None:
            import torch

            torch.set_num_threads(1)  # of each thread its own
            go.acquire()
            algorithm.learn(trainer)

        threading.Thread(target=loop, daemon=True).start()
        while True:
            go.release()
            done.acquire()
            yield

    def step(self) -> None:
        """One step."""
        self.clock.steps.append({})
        with self.clock.stage("step"):
            next(self._turns)


class _Words:
    """The task: even words are wanted."""

    name, verifiable, reward_range = "words", False, (0.0, 1.0)

    def problems(self, *_: Any) -> Sequence[Any]:
        """None of its own: they are given."""
        return []

    def rewards(self, _: Sequence[Any], completions: Sequence[str]) -> list[Any]:
        """The share of even words."""
        from gpuherd.posttrain.types import Reward

        return [Reward(reward(each)) for each in completions]

    def close(self) -> None:
        """Nothing was started."""


class Trl:
    """TRL's GRPOTrainer, whose own training step is called."""

    name = "trl"

    def __init__(self, model: Path, prompts: Sequence[str], folder: Path, kl_coef: float, steps: int):
        import warnings

        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        warnings.simplefilter("ignore")
        import torch

        self.clock = Clock()
        count = PROMPTS * GROUP
        arguments = GRPOConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            per_device_train_batch_size=count, num_generations=GROUP, max_completion_length=NEW, temperature=1.0,
            beta=kl_coef, epsilon=0.2, learning_rate=1e-5, max_grad_norm=1.0, loss_type="dapo", max_steps=steps,
            lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True, logging_strategy="no", top_k=0,
            shuffle_dataset=False,
        )  # fmt: skip
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        rows = Dataset.from_list([{"prompt": text} for text in prompts] * steps)

        def rewards(completions: Sequence[str], **_: Any) -> list[float]:
            return [reward(each) for each in completions]

        self._trainer = GRPOTrainer(
            loaded, rewards, args=arguments, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(model)
        )
        self._trainer.create_optimizer_and_scheduler(steps)
        self._trainer.model.train()
        self._trainer.current_gradient_accumulation_steps = 1
        self._batches = iter(self._trainer.get_train_dataloader())
        score = self._trainer._generate_and_score_completions
        self._trainer._generate_and_score_completions = self.clock.timing("sampling_and_reference", score)

    def step(self) -> None:
        """One step: generation, loss, gradient, clip, optimiser."""
        import torch

        trainer = self._trainer
        self.clock.steps.append({})
        with self.clock.stage("step"):
            trainer.training_step(trainer.model, next(self._batches), None)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
            trainer.model.zero_grad()
        here = self.clock.steps[-1]
        here["update"] = here["step"] - here["sampling_and_reference"]


if __name__ == "__main__":
    print(json.dumps(run(quick=False), indent=2))
