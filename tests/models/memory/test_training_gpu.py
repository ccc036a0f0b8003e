"""Real CUDA memory of a training step beside the plan's. Skips where there is no GPU."""

from __future__ import annotations

import pytest

from gpuherd.models.memory.kv_cache import Reserve
from gpuherd.models.memory.training import training_usage
from gpuherd.models.memory.training_job import TrainingJob, TrainingPrecision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.posttrain.engine.strategies import enable_checkpointing

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.models.memory.training_models import architecture, config_of, model_of  # noqa: E402


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("precision", list(TrainingPrecision))
def test_the_peak_of_two_steps(precision: TrainingPrecision, checkpointing: bool) -> None:
    """Two steps of AdamW (the first makes its states) on padded text; the second's peak within a tenth."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = config_of("llama", layers=8, vocab=32_000, **shape)
    job = TrainingJob(precision=precision, batch=4, prompt_tokens=256, new_tokens=256, checkpointing=checkpointing)
    planned = training_usage(architecture(config), job, Reserve(0, 0, 0.0), GpuSpec("0", "big", 1 << 50, 1 << 50))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    dtype = torch.bfloat16 if precision is TrainingPrecision.BF16 else torch.float32
    model = model_of(config, dtype).cuda().train()
    if checkpointing:
        enable_checkpointing(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 32_000, (4, 512), device="cuda")
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision is TrainingPrecision.MIXED):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    assert planned.total == pytest.approx(peak, rel=0.1)
