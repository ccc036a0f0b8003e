"""Stands in for vLLM where a test starts its process: what of its interface gpuherd calls, computed by transformers, an
answer and a token at a time. Draws depend on their seeds alone.

Variables for tests: ``STAND_IN_VERSION`` older than 0.32 has an interface of then; ``STAND_IN_STEP_S`` is how long a
step takes; ``STAND_IN_STOPS=N`` never ends the N-th step, ``STAND_IN_DIES=N`` ends the process there.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

__version__ = os.environ.get("STAND_IN_VERSION", "0.0.stand-in")


@dataclass
class SamplingParams:
    """Of one prompt."""

    temperature: float
    max_tokens: int
    logprobs: int
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool
    stop: list[str] = field(default_factory=list)
    n: int = 1
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0


class LLM:
    """A model in memory."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int,
        logprobs_mode: str,
        enable_lora: bool = False,
        max_lora_rank: int = 0,
        enable_sleep_mode: bool = False,
        **settings: Any,
    ):
        if "STAND_IN_VERSION" in os.environ:
            raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'logprobs_mode'")
        print("loading", model)
        self.can_sleep, self.asleep = enable_sleep_mode, set[str]()
        self.settings, self.positions, self.tempered = settings, max_model_len, logprobs_mode == "processed_logprobs"
        self.lora, self.rank, self.stale = enable_lora, max_lora_rank, False
        # As the real one takes checkpoints in float32 where nothing else is said.
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16" if dtype == "auto" else dtype).eval()
        self.llm_engine = _Engine(self.model.dtype)

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], *, use_tqdm: bool, lora_request: Any
    ) -> list[Any]:
        """An output a prompt."""
        assert not use_tqdm and not self.stale and not self.asleep
        assert (lora_request is not None) == self.lora
        if lora_request is not None and not hasattr(self.model, "peft_config"):
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, lora_request.path).eval()
            assert self.model.peft_config["default"].r <= self.rank
        return [
            SimpleNamespace(outputs=[self._drawn(each["prompt_token_ids"], how, number) for number in range(how.n)])
            for each, how in zip(prompts, params, strict=True)
        ]

    @torch.no_grad()
    def _drawn(self, prompt: list[int], how: SamplingParams, number: int) -> Any:
        assert how.top_p == 1 and how.top_k == 0 and not how.stop
        assert len(prompt) + how.max_tokens <= self.positions
        generator = torch.Generator().manual_seed((how.seed or 0) + number)
        ids: list[int] = []
        log_probs = []
        while len(ids) < how.max_tokens and (not ids or ids[-1] not in how.stop_token_ids):
            self.llm_engine.step()
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1].float()
            law = (logits / (how.temperature or 1.0)).log_softmax(-1)
            token = law.argmax() if how.temperature == 0 else law.exp().multinomial(1, generator=generator)
            told = law if self.tempered else logits.log_softmax(-1)
            ids.append(int(token))
            log_probs.append({ids[-1]: SimpleNamespace(logprob=float(told[ids[-1]]))})
        return SimpleNamespace(index=number, token_ids=ids, logprobs=log_probs)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """The weights are lost, and the cache."""
        assert self.can_sleep and level == 2 and mode == "abort"
        with torch.no_grad():
            for each in self.model.parameters():
                each.fill_(float("nan"))
        self.asleep, self.stale = {"weights", "kv_cache"}, True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Some of it is there again, with nothing in it."""
        assert tags is not None and set(tags) <= self.asleep
        self.asleep -= set(tags)
        return not self.asleep

    def collective_rpc(self, method: str, *, kwargs: dict[str, str]) -> None:
        """Loads other weights."""
        assert method == "reload_weights" and "weights" not in self.asleep
        kept = self.model.dtype
        other = AutoModelForCausalLM.from_pretrained(kwargs["weights_path"], dtype=kept)
        self.model.load_state_dict(other.state_dict())
        self.stale = True

    def reset_prefix_cache(self) -> bool:
        """Nothing is kept."""
        self.stale = False
        return not self.asleep


class _Engine:
    """Steps, and what else is asked of an engine."""

    def __init__(self, dtype: torch.dtype):
        self.model_config, self.engine_core = SimpleNamespace(dtype=dtype), SimpleNamespace(shutdown=lambda: None)
        self._steps = 0

    def step(self) -> None:
        """One step of all answers."""
        self._steps += 1
        told = {name: int(os.environ.get(f"STAND_IN_{name}", "0")) for name in ("DIES", "STOPS")}
        if self._steps == told["DIES"]:
            os._exit(3)
        time.sleep(10**6 if self._steps == told["STOPS"] else float(os.environ.get("STAND_IN_STEP_S", "0")))
