"""A causal model's body with a linear head that predicts the reward at the end, read at every token.

Imports torch: imported only where a classifier is made or loaded.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from gpuherd.errors import BadModel
from gpuherd.lm.forward import positions_of
from gpuherd.lm.guidance.guide import ClassifierForm, Kind


class ValueModel(nn.Module):
    """The module that is trained; ``Classifier`` loads and saves it.

    Attributes:
        body: transformers' model without its head for tokens.
        head: of ``form.width`` numbers (kind V), or of as many for each token of the vocabulary (kind Q).
        vocabulary: ids below this have an embedding.
        takes: the names of what the body's forward takes.
    """

    def __init__(self, body: nn.Module, form: ClassifierForm, width: int):
        """``width``: of the body's last state. The head is 0: it predicts p = 1/2, or the uniform law of the atoms."""
        super().__init__()
        self.body = body
        self.form = form
        embeddings: Any = body.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary = int(embeddings.weight.shape[0])
        out = form.width * (self.vocabulary if form.kind is Kind.Q else 1)
        self.head = nn.Linear(width, out, device=embeddings.weight.device, dtype=embeddings.weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.takes = frozenset(inspect.signature(type(body).forward).parameters)

    @property
    def config(self) -> Any:
        """The body's, transformers'."""
        return self.body.config

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The value of every token behind its prefix: its logits, (rows, tokens) float32, or (rows, tokens, atoms).

        Args:
            ids: (rows, tokens) int64.
            mask: 1 for tokens that count, 0 for padding at either side; all count by default. Values of padding mean
                nothing.
            positions: each token's place in its row; counted from the mask by default.

        A classifier of kind Q tells the first token's value of a row by 0: nothing stands before it.
        """
        mask = torch.ones_like(ids) if mask is None else mask
        positions = positions_of(mask) if positions is None else positions
        states = self.states(ids, mask, positions)
        if self.form.kind is Kind.V:
            return self.values_at(states)
        values = self.values_of(states[:, :-1], ids[:, 1:, None])[:, :, 0]
        values = torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)
        first = (positions == 0).view(*positions.shape, *[1] * (values.dim() - 2))
        return values.masked_fill(first, 0)

    def states(self, ids: torch.Tensor, mask: Any, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        """The body's last states, (rows, tokens, width). ``mask`` and ``more`` as its forward takes them."""
        words = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **more}
        if "position_ids" in self.takes:
            words["position_ids"] = positions
        states: torch.Tensor = self.body(**words)[0]
        return states

    def values_at(self, states: torch.Tensor) -> torch.Tensor:
        """Kind V: the values of the tokens that these are the states of, (...) or (..., atoms), float32."""
        values = _linear(states, self.head.weight, self.head.bias)
        return values if self.form.atoms else values[..., 0]

    def values_of(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Kind Q: the values of tokens behind states (..., width): tokens (..., k) -> (..., k) or (..., k, atoms),
        float32. Only these tokens' rows of the head are used."""
        rows = self.head.weight.view(self.vocabulary, -1)  # (vocabulary, atoms * width)
        weights = embedding(tokens, rows).view(*tokens.shape, self.form.width, -1).float()
        biases = embedding(tokens, self.head.bias.view(self.vocabulary, -1)).float()
        values: torch.Tensor = (weights @ states.float()[..., None, :, None])[..., 0] + biases
        return values if self.form.atoms else values[..., 0]

    def gradient_checkpointing_enable(self, **how: Any) -> None:
        """Transformers', of the body."""
        self.body.gradient_checkpointing_enable(**how)  # type: ignore[operator]

    def gradient_checkpointing_disable(self) -> None:
        """Transformers', of the body."""
        self.body.gradient_checkpointing_disable()  # type: ignore[operator]


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """In float32, whatever the body computes in: of a value in bfloat16 three digits would be left."""
    with torch.autocast(states.device.type, enabled=False):
        return linear(states.float(), weight.float(), bias.float())


def width_of(body: nn.Module, name: str) -> int:
    """The width of a body's last states. It reads four tokens, twice, the last another one.

    Raises BadModel where what follows a token changes its state: a model that reads both ways has no value of a prefix.
    """
    embeddings: Any = body.get_input_embeddings()  # type: ignore[operator]
    vocabulary = int(embeddings.weight.shape[0])
    device = embeddings.weight.device
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]], device=device) % vocabulary
    words: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    training = body.training
    with torch.no_grad():
        states = body.eval()(**words)[0].float()
    body.train(training)
    if not torch.allclose(states[0, :3], states[1, :3], rtol=1e-2, atol=1e-3 * float(states.abs().max())):
        raise BadModel(f"{name} reads what follows a token too; a classifier is made from a causal language model")
    return int(states.shape[-1])
