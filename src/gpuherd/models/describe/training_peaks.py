"""Measures what a model's layers keep for the backward pass and what that pass needs beside it, as ``peaks`` measures
answers: fake tensors, the first layers alone, three lengths.

A layer keeps what is alive after its forward pass and was not before. Its backward pass is what happens between the
arrival of its result's gradient and that of its input's; the largest polynomials of its operations are kept. What an
operation finds there whatever the tokens is gradients of the layer's parameters, those made so far and the one that is
being made: its constant coefficient, which unlike the others is of the whole batch.

Two ways of training are run in each precision: of all parameters (``whole``), and of none (``frozen``), where gradients
go back through the layers to adapters, which plans add. Autocast's copies of weights are left out: plans count them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from gpuherd.models.describe.description import BEFORE, Polynomial, SharedInput, TrainingPeaks, passing_bytes
from gpuherd.models.describe.peaks import (
    LikeCuda,
    LivingStorages,
    fake_tensors,
    first_layers,
    measured_layers,
    quadratic,
)

if TYPE_CHECKING:
    from gpuherd.models.describe.meta import Layers

_BATCH = 2  # not 1: tensors of one sequence are copied less often
_KINDS = ("whole", "frozen")
_DTYPES = {"fp32": torch.float32, "mixed": torch.float32, "bf16": torch.bfloat16}
# Sequences and lengths at which operations are compared: those that are nowhere the largest are dropped.
_SIZES = tuple(product((1, 2, 4, 8, 16, 64), [1, *(some << n for n in range(5, 16) for some in (2, 3)), 1 << 20]))


@dataclass(frozen=True)
class MeasuredTraining:
    """Results of the runs: of the layers that were run, by name, and of all that stands around the layers; with
    ``BEFORE`` what is there when the first layer begins, but for its input: masks, tables of angles."""

    layers: Mapping[str, Mapping[str, TrainingPeaks]]
    inputs: Mapping[str, tuple[SharedInput, ...]]
    around: Mapping[str, Polynomial]


@dataclass
class _LayerRun:
    """One layer in one run: bytes, and the bytes alive at each operation beyond what was there or will be kept."""

    before: int = 0
    kept: int = 0
    entry: int = 0
    begun: int = 0
    forward: list[tuple[str, int]] = field(default_factory=list)
    backward: list[tuple[str, int]] = field(default_factory=list)


class _Step(LivingStorages):  # type: ignore[no-untyped-call]
    """Counts living storages through a forward and a backward pass, by layer."""

    def __init__(self, model: Any, names: Sequence[str], quantisable: Set[str], *, mixed: bool) -> None:
        super().__init__()
        self.layers = {name: _LayerRun() for name in names}
        self.inputs: Mapping[str, tuple[SharedInput, ...]] = {}
        self.outside = 0
        self.entered: int | None = None
        self._model, self._mixed = model, mixed
        self._forward = self._backward = ""
        self._parameters = {value.untyped_storage()._cdata for value in model.parameters()}
        self._weights = {
            value.untyped_storage()._cdata: name for name, value in model.named_parameters() if name in quantisable
        }
        self._read: dict[str, dict[int, list[str]]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cast = self._mixed and func is torch.ops.aten._to_copy.default and self._key(args[0]) in self._parameters
        self.add_all(result, counts=not cast)
        if self._forward:
            self._note_inputs(args)
            self.layers[self._forward].forward.append((str(func), self.now))
        elif self._backward:
            self.layers[self._backward].backward.append((str(func), self.now))
        return result

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _note_inputs(self, args: Any) -> None:
        """Which tensor a linear weight is multiplied with."""
        keys = [self._key(each) for each in args if isinstance(each, torch.Tensor)]
        weights = [self._weights[key] for key in keys if key in self._weights]
        others = [key for key in keys if key not in self._parameters and key in self.living]
        if weights and others:
            names = self._read[self._forward].setdefault(self.living[others[-1]][0], [])
            names += [name for name in weights if name not in names]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Notes each layer that is entered and left."""
        with ExitStack() as stack:
            for name in self.layers:
                module = self._model.get_submodule(name)

                def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                    self._enter(name, args, kwargs)

                def leave(_: Any, __: Any, result: Any, name: str = name) -> None:
                    self._leave(name, result)

                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            yield

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        read = next(each for each in tree_leaves((args, kwargs)) if _is_stream(each))
        if not read.requires_grad:  # as PEFT has it where nothing below is trained
            read.requires_grad_(True)
        layer = self.layers[name]
        layer.before, layer.entry = self.now, read.untyped_storage().nbytes()
        if self.entered is None:
            self.entered = layer.before - layer.entry
        self._forward = name

        def arrived(_: torch.Tensor) -> None:
            if self._backward == name:
                self._backward = ""

        read.register_hook(arrived)

    def _leave(self, name: str, result: Any) -> None:
        layer = self.layers[name]
        layer.kept = self.now - layer.before
        self._forward = ""

        def arrived(gradient: torch.Tensor) -> None:
            self._backward = name
            layer.begun = self.now - gradient.untyped_storage().nbytes()

        next(each for each in tree_leaves(result) if _is_stream(each)).register_hook(arrived)

    def done(self, kept: int) -> None:
        """The forward pass is over, and so much is kept: what stands around the layers has the rest, and of the inputs
        of linear weights only what is kept is still alive."""
        self.outside = kept - sum(layer.kept for layer in self.layers.values())
        alive = {number for number, _ in self.living.values()}
        self.inputs = {
            name: tuple(
                SharedInput(tuple(weight.removeprefix(name) for weight in weights), number in alive)
                for number, weights in read.items()
            )
            for name, read in self._read.items()
        }


def _is_stream(value: Any) -> bool:
    """Whether it is a tensor that gradients go through."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def measure_training(
    built: Any, lists: Sequence[Layers], quantisable: Set[str], *, step: int, fill: int
) -> MeasuredTraining:
    """Runs training steps of the first layers of a model.

    Args:
        built: the model on the meta device; it predicts next tokens.
        lists: its lists of layers that are called.
        quantisable: names of weights that adapters may lie on.
        step: tokens between the lengths.
        fill: the lengths are multiples of it.
    """
    names = measured_layers(lists)
    lengths = [-(-step // fill) * fill * times for times in (1, 2, 3)]
    layers: dict[str, dict[str, TrainingPeaks]] = {name: {} for name in names}
    around: dict[str, Polynomial] = {}
    inputs: Mapping[str, tuple[SharedInput, ...]] = {}
    for dtype in dict.fromkeys(_DTYPES.values()):
        with fake_tensors():
            model = first_layers(built, lists, dtype).train()
            for kind, precision in product(_KINDS, [name for name, each in _DTYPES.items() if each is dtype]):
                key = f"{kind}-{precision}"
                model.requires_grad_(kind == "whole")
                runs = [_train(model, names, quantisable, tokens, mixed=precision == "mixed") for tokens in lengths]
                around[key] = _polynomial(lengths, [run.outside for run in runs])
                around[f"{BEFORE}{key}"] = _polynomial(lengths, [run.entered or 0 for run in runs])
                for name in names:
                    layers[name][key] = _peaks(lengths, [run.layers[name] for run in runs])
                if key == "frozen-fp32":
                    inputs = runs[0].inputs
    return MeasuredTraining(layers, inputs, around)


def _train(model: Any, names: Sequence[str], quantisable: Set[str], tokens: int, *, mixed: bool) -> _Step:
    """A forward pass of a padded batch, and the backward pass of its logits."""
    run = _Step(model, names, quantisable, mixed=mixed)
    ids, mask = (torch.full((_BATCH, tokens), 1, dtype=torch.long) for _ in range(2))
    options = {"attention_mask": mask, "use_cache": False}
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = ids
    known = set(inspect.signature(model.forward).parameters)
    run.add_all((*model.parameters(), *model.buffers(), ids, mask))
    start = run.now
    with LikeCuda(), run.hooks(), run:
        with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
            logits = model(input_ids=ids, **{key: each for key, each in options.items() if key in known}).logits
        run.done(run.now - start - logits.untyped_storage().nbytes())
        run.entered = 0 if run.entered is None else max(0, run.entered - start)
        logits.backward(torch.zeros_like(logits))
    model.zero_grad(set_to_none=True)
    return run


def _peaks(lengths: Sequence[int], runs: Sequence[_LayerRun]) -> TrainingPeaks:
    """The polynomials of one layer, from one run of it at each length."""
    operations = [
        [(name, alive - run.before - run.kept) for name, alive in run.forward]
        + [(name, alive - run.begun) for name, alive in run.backward]
        for run in runs
    ]
    polynomials = (_polynomial(lengths, row) for row in _rows(operations))
    passing = [(max(0, once * _BATCH), each, pair) for once, each, pair in polynomials]
    distinct = _undominated(passing)
    largest = {
        max(distinct, key=lambda each: passing_bytes(each, batch, tokens, gradients=gradients)): None
        for batch, tokens in _SIZES
        for gradients in (True, False)
    }
    return TrainingPeaks(
        _polynomial(lengths, [run.kept for run in runs]),
        _polynomial(lengths, [run.entry for run in runs]),
        tuple(largest),
    )


def _undominated(polynomials: Sequence[Polynomial]) -> list[Polynomial]:
    """Those that no other is at least as large as at every size."""
    found: list[Polynomial] = []
    for each in sorted(set(polynomials), reverse=True):
        if not any(all(a >= b for a, b in zip(other, each, strict=True)) for other in found):
            found.append(each)
    return found or [(0, 0, 0)]


def _rows(operations: Sequence[Sequence[tuple[str, int]]]) -> Iterator[list[int]]:
    """The bytes of each operation at all lengths; where code loops over tokens, the most of operations of one name."""
    names = [[name for name, _ in some] for some in operations]
    if all(each == names[0] for each in names):
        yield from ([alive for _, alive in row] for row in zip(*operations, strict=True))
        return
    for name in set(names[0]).intersection(*names):
        yield [max(alive for each, alive in some if each == name) for some in operations]


def _polynomial(lengths: Sequence[int], values: Sequence[int]) -> Polynomial:
    """Through the values of a batch, for one sequence."""
    return quadratic(lengths, [value / _BATCH for value in values])
