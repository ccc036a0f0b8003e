"""One of several processes that load models of which each reads its rows alone: what test_loading starts by torchrun.

``python -m torch.distributed.run --nproc-per-node=2 sharded.py FOLDER``: every folder in it is a model (``NAME``) with
perhaps an adapter beside it (``NAME-adapter``); the main process leaves ``told.json``, and ``NAME-saved``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from gpuherd.posttrain.engine import strategies
from gpuherd.posttrain.engine.dist_env import DistEnv, leave
from gpuherd.posttrain.engine.fit import save_model
from gpuherd.posttrain.engine.options import Lora, OptimiserOptions, StepOptions, Strategy
from gpuherd.posttrain.engine.train_engine import TrainEngine
from gpuherd.posttrain.policy_gradient.policy import load_for_training
from gpuherd.posttrain.preference.reward_model import load_base
from gpuherd.posttrain.types import Policy, Precision

IDS = torch.arange(4, 24).reshape(2, 10)
STEPS = StepOptions(2, strategy=Strategy.FSDP)


def compared(policy: Policy, lora: Lora | None, dtype: str, world: DistEnv, saved: Path) -> dict[str, Any]:
    """What the rows that were read make, beside the model that one process loads whole."""
    torch.manual_seed(5)
    whole = load_for_training(policy, Precision(dtype), "cpu", lora).module
    drawn = torch.rand(())
    torch.manual_seed(5)
    module = load_for_training(policy, Precision(dtype), "cpu", lora, sharded=True).module
    held = [weight for weight in module.parameters() if hasattr(weight, "gpuherd_rows")]
    one = TrainEngine(module, OptimiserOptions(0.01), STEPS, world, total_steps=1)
    state, left = whole.state_dict(), one.full_state()
    with torch.no_grad():
        logits = one.module(input_ids=IDS).logits
    figures = one.step(list(range(world.rank, 3, world.size)), lambda items: _loss(one.module, items), len)
    save_model(one, saved)
    return {
        "placeholders": len(held),
        "bytes": sum(weight.untyped_storage().nbytes() for weight in held),
        "rows": sum(weight.gpuherd_rows.numel() for weight in held) / sum(weight.numel() for weight in held),
        "differ": [name for name in left if not torch.equal(left[name], state[name])] if world.is_main else [],
        "names": not world.is_main or set(left) == set(state),
        "buffers": [
            name
            for name, buffer in whole.named_buffers()
            if not torch.equal(buffer, one.plain.get_buffer(name)) or buffer.dtype != one.plain.get_buffer(name).dtype
        ],
        "trained": {name for name, weight in whole.named_parameters() if weight.requires_grad} == set(one.weights),
        "logits": torch.equal(logits, whole(input_ids=IDS).logits),
        "drawn": torch.equal(torch.rand(()), drawn) or bool(held),
        "loss": figures.loss,
    }


def reward(model: Path, world: DistEnv) -> dict[str, Any]:
    """The same of a reward model, whose head no checkpoint has."""
    whole, _ = load_base(str(model), Precision(), "cpu", 7)
    module, _ = load_base(str(model), Precision(), "cpu", 7, sharded=True)
    held = {name for name, weight in module.named_parameters() if hasattr(weight, "gpuherd_rows")}
    left = {name for name, _ in module.named_parameters()} - held
    strategies.distributed(module, STEPS, world, None, None, all_used=True)
    differ = [
        name
        for name, each in module.named_parameters()
        if not torch.equal(each.full_tensor(), whole.get_parameter(name))
    ]
    return {"drawn": sorted(left), "differ": differ, "kind": type(whole).__name__ in type(module).__name__}


def _loss(module: Any, items: Any) -> Any:
    ids = IDS[:1] + torch.tensor(items)[:, None]
    return module(input_ids=ids).logits.float().logsumexp(-1).mean(-1).sum()


def main(folder: Path) -> None:
    """All of it."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    with DistEnv.from_environment("cpu") as world:
        for model in sorted(each for each in folder.iterdir() if each.is_dir() and "-" not in each.name):
            adapter = folder / f"{model.name}-adapter"
            target = "c_attn" if model.name == "gpt" else "q_proj"
            for name, policy, lora, dtype in (
                (model.name, Policy(str(model)), None, "float32"),
                (f"{model.name} lora", Policy(str(model)), Lora(r=4, target_modules=(target,)), "bfloat16"),
                (f"{model.name} adapter", Policy(str(model), adapter=str(adapter)), None, "float32"),
            ):
                if policy.adapter is None or adapter.is_dir():
                    saved = folder / f"{name.replace(' ', '-')}-saved"
                    told[name] = world.gather(compared(policy, lora, dtype, world, saved))
        told["reward"] = world.gather(reward(folder / "llama", world))
        if world.is_main:
            (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
