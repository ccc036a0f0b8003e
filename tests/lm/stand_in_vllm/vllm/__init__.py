"""Stands in for vLLM where a test starts its process: what of its interface gpuherd calls, computed by transformers, an
answer and a token at a time. Draws depend on their seeds alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

__version__ = "0.0.stand-in"


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
        **settings: Any,
    ):
        self.settings, self.positions, self.tempered = settings, max_model_len, logprobs_mode == "processed_logprobs"
        self.lora, self.rank, self.stale = enable_lora, max_lora_rank, False
        # As the real one takes checkpoints in float32 where nothing else is said.
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16" if dtype == "auto" else dtype).eval()
        config = SimpleNamespace(dtype=self.model.dtype)
        self.llm_engine = SimpleNamespace(model_config=config, engine_core=SimpleNamespace(shutdown=lambda: None))

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], *, use_tqdm: bool, lora_request: Any
    ) -> list[Any]:
        """An output a prompt."""
        assert not use_tqdm and not self.stale
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
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1].float()
            law = (logits / (how.temperature or 1.0)).log_softmax(-1)
            token = law.argmax() if how.temperature == 0 else law.exp().multinomial(1, generator=generator)
            told = law if self.tempered else logits.log_softmax(-1)
            ids.append(int(token))
            log_probs.append({ids[-1]: SimpleNamespace(logprob=float(told[ids[-1]]))})
        return SimpleNamespace(index=number, token_ids=ids, logprobs=log_probs)

    def collective_rpc(self, method: str, *, kwargs: dict[str, str]) -> None:
        """Loads other weights."""
        assert method == "reload_weights"
        kept = self.model.dtype
        other = AutoModelForCausalLM.from_pretrained(kwargs["weights_path"], dtype=kept)
        self.model.load_state_dict(other.state_dict())
        self.stale = True

    def reset_prefix_cache(self) -> bool:
        """Nothing is kept."""
        self.stale = False
        return True
