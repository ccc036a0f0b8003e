"""A policy with a head that says what reward is to come: on the policy's own trunk, so one pass tells both.

Imports torch: imported only where a model is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpuherd.errors import BadModel

FILE = "value_head.safetensors"


class ValuedPolicy(nn.Module):
    """A causal model (transformers' or PEFT's) and a linear value head over its last hidden states, in float32.

    The head begins at 0: every value is 0, and the first advantages are the rewards themselves.
    """

    def __init__(self, policy: Any):
        super().__init__()
        self.policy = policy
        inner = policy.get_base_model() if hasattr(policy, "peft_type") else policy
        width = inner.config.get_text_config(decoder=True).hidden_size
        self.value_head = nn.Linear(width, 1, device=inner.get_input_embeddings().weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def config(self) -> Any:
        """The policy's."""
        return self.policy.config

    def forward(self, **words: Any) -> tuple[Tensor, Tensor]:
        """Logits as the policy makes them, and the value at every token read, (rows, tokens): of what is to come
        behind it."""
        made = self.policy(**words, output_hidden_states=True)
        states = made.hidden_states[-1]
        with torch.autocast(states.device.type, enabled=False):
            # Its weight is float32, unless FSDP computes in another dtype.
            return made.logits, self.value_head(states.to(self.value_head.weight.dtype))[..., 0]


def save_value_head(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Writes the head, of the weights of a ``ValuedPolicy``, into a folder."""
    from safetensors.torch import save_file

    prefix = "value_head."
    save_file(
        {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}, folder / FILE
    )


def load_value_head(module: ValuedPolicy, folder: Path) -> None:
    """Gives the module the head that was saved in a folder. Raises BadModel for one of another width."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        module.value_head.load_state_dict(load_file(folder / FILE))
    except (RuntimeError, OSError, SafetensorError) as problem:
        raise BadModel(f"{folder / FILE} is no value head of this model: {problem}") from None
