"""Log-probs in chunks, their entropies and their gradients are those of the whole logits, for heads of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuherd.posttrain.engine.log_probs import TokenLogProbs, forward_log_probs, padded, token_log_probs

# PEFT asks transformers by a name that is old there.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ROWS = [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 9]]
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {  # the family, its options, whether its head is the last it does
    "llama": ("Llama", {}, True),
    "tied": ("Llama", {"tie_word_embeddings": True}, True),
    "bias": ("Phi", {}, True),
    "soft-capping": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}, False),
    "scale": ("Cohere", {"logit_scale": 0.5}, False),
}


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    import transformers

    family, options, _ = KINDS[kind]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)


def wanted_of(mask: torch.Tensor) -> torch.Tensor:
    found = mask.bool().clone()
    found[:, :2] = False
    found[0, 4] = False
    found[:, 1:] &= mask[:, :-1].bool()  # nothing stands before a row's first token
    return found


def whole(model: Any, ids: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor, temperature: float) -> TokenLogProbs:
    """The same of all logits at once."""
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits / temperature
    of_all = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)[:, :-1]
    none = of_all.new_zeros((len(ids), 1))
    found = of_all.gather(2, ids[:, 1:, None])[..., 0]
    made = (found, -(of_all.exp() * of_all).sum(dim=-1), (of_all.argmax(dim=-1) == ids[:, 1:]).to(found.dtype))
    return TokenLogProbs(*(torch.where(wanted, torch.cat([none, each], dim=1), none) for each in made))


def slopes(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


# (transformers' eager attention of Gemma 2 makes NaN of what lies left in float64.)
@pytest.mark.parametrize(
    ("kind", "left"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if kind != "soft-capping")]
)
def test_numbers_and_gradients_are_those_of_the_whole_logits(kind: str, left: bool) -> None:
    model = model_of(kind)
    ids, mask = padded(ROWS, "cpu")
    if left:
        ids, mask = ids.flip(1), mask.flip(1)
    wanted = wanted_of(mask)
    theirs = whole(model, ids, mask, wanted, 0.7)
    want = slopes(model, (theirs.log_probs * 1.5 - 0.3 * theirs.entropies).sum())
    for chunk in (1, 3, None):
        ours = token_log_probs(model, ids, mask, wanted, temperature=0.7, entropy_gradient=True, chunk=chunk)
        found = slopes(model, (ours.log_probs * 1.5 - 0.3 * ours.entropies).sum())
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
        assert found.keys() == want.keys()
        for name, slope in want.items():
            torch.testing.assert_close(found[name], slope, msg=name)
    _, answer = forward_log_probs(model, ids, mask, wanted)
    assert (answer.logits.shape[-1] == 3) is KINDS[kind][2]  # whether whole logits were computed
    torch.testing.assert_close(whole(model, ids, mask, wanted, 0.7).log_probs, theirs.log_probs)  # the head is itself


def test_entropies_have_a_gradient_only_where_it_is_asked_for() -> None:
    model = model_of("llama")
    ids, mask = padded(ROWS, "cpu")
    found = slopes(model, token_log_probs(model, ids, mask, wanted_of(mask)).entropies.sum())
    assert all(not each.any() for each in found.values())


def test_a_first_token_is_never_had() -> None:
    model = model_of("llama")
    ids, mask = padded(ROWS, "cpu")
    for side in ((ids, mask), (ids.flip(1), mask.flip(1))):
        found = token_log_probs(model, *side, torch.ones_like(mask, dtype=torch.bool)).log_probs != 0
        assert found.sum(dim=1).tolist() == [6, 4 if side[0] is ids else 3]
    # (Behind a row stands filling, which nobody wants.)


@pytest.mark.parametrize("kind", ["llama", "soft-capping"])
def test_nothing_wanted(kind: str) -> None:
    """Empty completions: zeros, and gradients of zero for every weight, as DDP waits for."""
    model = model_of(kind)
    ids, mask = padded(ROWS, "cpu")
    found = token_log_probs(model, ids, mask, torch.zeros_like(mask, dtype=torch.bool))
    assert not any(each.any() for each in found)
    assert set(slopes(model, found.log_probs.sum())) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["mixed", "half"])
def test_half_precision(dtype: torch.dtype) -> None:
    """Logits are computed in bfloat16, as the whole ones are, and read in float32."""
    model = model_of("llama", dtype)
    ids, mask = padded(ROWS, "cpu")
    wanted = wanted_of(mask)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        theirs, ours = whole(model, ids, mask, wanted, 1.0), token_log_probs(model, ids, mask, wanted, chunk=2)
    assert ours.log_probs.dtype == torch.float32
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5)
    want, found = slopes(model, theirs.log_probs.sum()), slopes(model, ours.log_probs.sum())
    for name, slope in want.items():
        assert (found[name] - slope).norm() <= 0.01 * slope.norm(), name


def test_an_adapter_of_the_head_and_of_layers() -> None:
    """The head that an adapter changes is no plain map any more; that of a model whose layers have one is."""
    from peft import LoraConfig, get_peft_model

    ids, mask = padded(ROWS, "cpu")
    wanted = wanted_of(mask)
    for targets, plain in ((["q_proj"], True), (["q_proj", "lm_head"], False)):
        model = get_peft_model(model_of("llama"), LoraConfig(target_modules=targets, init_lora_weights=False))
        theirs = whole(model, ids, mask, wanted, 1.0)
        ours, answer = forward_log_probs(model, ids, mask, wanted)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs)
        assert (answer.logits.shape[-1] == 3) is plain
        want, found = slopes(model, theirs.log_probs.sum()), slopes(model, ours.log_probs.sum())
        assert found.keys() == want.keys() and all("lora_" in name for name in found)
        for name, slope in want.items():
            torch.testing.assert_close(found[name], slope, msg=name)


def test_finding_out_about_a_head_changes_nothing() -> None:
    """No random numbers are spent, and modules are in the mode that they were in."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of("llama"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.5))
    model.train()
    model.get_base_model().model.layers[0].eval()
    modes = [each.training for each in model.modules()]
    ids, mask = padded(ROWS, "cpu")
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(token_log_probs(model, ids, mask, wanted_of(mask)).log_probs)
    assert torch.equal(made[0], made[1])
    assert [each.training for each in model.modules()] == modes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_does_not_follow_the_logits() -> None:
    """A vocabulary of 152,000: 1,024 tokens have 594 MiB of logits; a chunk is 128 MiB."""
    script = Path(__file__).with_name("log_probs_memory.py")
    taken = {}
    for kind in ("chunked", "whole"):
        done = subprocess.run(
            [sys.executable, str(script), kind, "152064", "1024"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            check=True,
        )
        before, after, _ = map(float, done.stdout.split())
        taken[kind] = after - before
    assert taken["whole"] > 2 * 594
    assert taken["chunked"] < 600 < taken["whole"] / 2
