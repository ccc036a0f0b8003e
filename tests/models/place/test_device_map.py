"""Our device maps as transformers and accelerate take them: every parameter and buffer has its place, no block that may
not be split is."""

from __future__ import annotations

import pytest
from tests.models.memory.toy import gpus_of

from gpuherd.models.describe.known_models import known_model
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan

pytest.importorskip("transformers")

MODELS = ["llama-3.2-1b", "gpt2", "opt-1.3b", "pythia-1b", "mixtral-8x7b", "gemma-2-2b", "gemma-3-4b", "t5-small"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_libraries_accept_the_map(model: str) -> None:
    import torch
    from accelerate.utils import check_device_map
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    architecture = read_architecture(model)
    whole = (architecture.parameters * 2 >> 20) + 3000
    plan = make_plan(architecture, gpus_of(*[whole] * 4), Precision.BF16, Workload(), parallel="layers")
    assert isinstance(plan, MemoryPlan), plan.reason
    assert plan.gpus == 4
    known = known_model(model)
    assert known is not None
    fields = {name: value for name, value in known.config.items() if name != "model_type"}
    kind = AutoModelForSeq2SeqLM if architecture.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        loaded = kind.from_config(AutoConfig.for_model(known.config["model_type"], **fields))
    check_device_map(loaded, plan.device_map)
    names = dict(loaded.named_modules())
    assert all(path in names for path in plan.device_map)
    whole_ones = {name for name, module in names.items() if type(module).__name__ in loaded._no_split_modules}
    assert not [path for path in plan.device_map if any(path.startswith(f"{name}.") for name in whole_ones)]
