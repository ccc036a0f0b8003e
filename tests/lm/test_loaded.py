"""Models as ``gpuherd`` loads them: spread over devices, with an adapter, divided over processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.test_tensor_parallel import two_ranks
from tests.qa.small_models import facts, plain_prompt, random_llama

from gpuherd.errors import BadModel
from gpuherd.lm.backend import Decoding, PromptTokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.lm.model import LanguageModel  # noqa: E402
from gpuherd.models.load.loading import load_model  # noqa: E402

HOW = Decoding(greedy=True, samples=2, max_new_tokens=8, end_ids=(1,), seed=2)


def asked(tokenizer: Any) -> list[PromptTokens]:
    return [
        PromptTokens(question, tuple(tokenizer(plain_prompt(question))["input_ids"])) for question, _ in facts()[:5]
    ]


def test_a_model_over_several_pretended_gpus_answers_as_on_the_cpu(trained: Path) -> None:
    plain = LanguageModel.of(load_model(str(trained), device_map="cpu", dtype="fp32"))
    spread = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "model.rotary_emb": 0}
    spread["lm_head"] = 1
    parts = load_model(str(trained), device_map=spread, dtype="fp32", simulate=True)
    prompts = asked(plain.tokenizer)
    assert LanguageModel.of(parts).decode(prompts, HOW) == plain.decode(prompts, HOW)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_takes_part_and_one_that_learns_prompts_is_refused(trained: Path) -> None:
    peft = pytest.importorskip("peft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    prompts = asked(tokenizer)

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(trained)

    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        base(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    lm = LanguageModel(wrapped, tokenizer)
    decoded = lm.decode(prompts, Decoding(max_new_tokens=6))
    for prompt, each in zip(prompts, decoded, strict=True):
        assert each.greedy is not None
        with torch.inference_mode():
            logits = wrapped(torch.tensor([[*prompt.token_ids, *each.greedy.token_ids]])).logits[0].log_softmax(-1)
        start = len(prompt.token_ids) - 1
        expected = [float(logits[start + place, token]) for place, token in enumerate(each.greedy.token_ids)]
        assert each.greedy.log_probs == pytest.approx(expected, abs=1e-5)
    assert decoded != LanguageModel(base(), tokenizer).decode(prompts, Decoding(max_new_tokens=6))
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(BadModel, match="PROMPT_TUNING adapter learns prompts"):
        LanguageModel(peft.get_peft_model(base(), virtual), tokenizer)


RANK = """
import json, os, sys
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.tensor_parallel import leave, load_tensor_parallel, this_rank
from gpuherd.lm.backend import Decoding, PromptTokens
from gpuherd.lm.model import LanguageModel
loaded, _ = load_tensor_parallel(LoadRequest(model=sys.argv[1], dtype="fp32"))
lm = LanguageModel.of(loaded)
prompts = [PromptTokens(str(number), (0, *range(20, 30 + number))) for number in range(4)]
decoded = lm.decode(prompts, Decoding(greedy=True, samples=2, max_new_tokens=8, end_ids=(1,), seed=2))
found = [[each.token_ids, each.log_probs] for one in decoded for each in (one.greedy, *one.samples)]
with open(f"{sys.argv[2]}.{this_rank(os.environ).number}", "w") as file:
    json.dump(found, file)
leave()
"""


@pytest.mark.slow
def test_ranks_that_hold_a_model_together_draw_the_same(tmp_path: Path) -> None:
    folder = random_llama(tmp_path / "model")
    two_ranks(RANK, str(folder), str(tmp_path / "found"))
    first, second = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    lm = LanguageModel.of(load_model(str(folder), device_map="cpu", dtype="fp32"))
    prompts = [PromptTokens(str(number), (0, *range(20, 30 + number))) for number in range(4)]
    alone = [each for one in lm.decode(prompts, HOW) for each in (one.greedy, *one.samples) if each is not None]
    for (token_ids, log_probs), each in zip(first, alone, strict=True):
        assert tuple(token_ids) == each.token_ids
        assert log_probs == pytest.approx(each.log_probs, abs=1e-4)
