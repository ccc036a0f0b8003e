"""A policy in training, decoded by vLLM: a copy of its weights in vLLM's process, which is given those of each step.

Weights go through files in memory (``/dev/shm``), once a machine: its first process writes them as transformers saves a
model, every process has its own vLLM read them in the place of the older ones, and they are removed. vLLM starts once,
and sleeps while the policy learns on the GPU that they share. An adapter is merged into what is written, and stays
apart in the module. Imports torch inside functions only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.lm.backend import Backend
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.rollout.vllm import VllmSampler, sampling_precision
from gpuherd.posttrain.types import Policy, Precision, Problem, Sampling

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")  # noqa: S108 - tmpfs; the folder in it is this user's alone
_SPARE = 1.1  # times what is written
_NONE = -1  # vLLM has no weights of the training


class FollowingSampler(VllmSampler):
    """vLLM with the weights of a module in training, as of the last ``follow``.

    Args:
        policy: what the training began with: an engine starts with its model.
        module: transformers' or PEFT's causal model in training, whole in this process whenever the sampler is used.
        precision: of the training; vLLM's weights are in the dtype that it computes in.
        problems: of the training: the engine starts with room for the longest.
        turns: answers of an episode, at most.
        folder: of the training: what tells its files in memory from others'.

    Raises what ``VllmSampler`` raises, UsageError for quantised weights.
    """

    _sleeps: ClassVar[bool] = True

    def __init__(
        self,
        policy: Policy,
        module: Any,
        precision: Precision,
        world: DistEnv,
        sampling: Sampling,
        problems: Sequence[Problem],
        folder: Path,
        *,
        turns: int = 1,
    ):
        inner = module.get_base_model() if hasattr(module, "peft_type") else module
        if getattr(inner, "is_quantized", False):
            raise UsageError(
                f"generation.backend=vllm: the weights of {policy.model} are quantised, and can't be handed over to it "
                "after each step; set generation.backend=hf, or train without quantisation"
            )
        held = sampling_precision(precision)
        if held.dtype is None:  # that of the checkpoint, for which vLLM would take half as wide a one
            held = replace(held, dtype=str(inner.dtype).removeprefix("torch."))
        super().__init__(replace(policy, adapter=None), held, world.device, sampling)
        self._module, self._world, self._dtype, self._problems = module, world, held.dtype, problems
        self._folder, self._turns, self._version = folder, turns, _NONE
        self._scratch = [_place(folder, world.rank)]

    def follow(self, version: int) -> None:
        """Has vLLM decode by the module's weights as they are, and wakes it. All processes call it together.

        Args:
            version: of the weights, from 0; those of a version that vLLM has are not handed over again, unless it has
                slept.

        Raises CannotWrite where the files find no room, VllmFailed where vLLM can't take them.
        """
        if version == self._version:
            return
        self._version = _NONE
        if self._world.device != "cpu":
            import torch

            torch.cuda.empty_cache()  # vLLM's process finds no memory that torch keeps here for later
        if self._engine is None:
            longest = max(map(self._prompt_tokens, self._problems), default=1)
            self._with_room(longest + self._turns * self.sampling.max_new_tokens)
        first = self._world.rank - self._world.local_rank  # of this machine
        with self._in_memory() if self._world.rank == first else nullcontext() as mine:
            gathered = self._world.gather(None if mine is None else (mine, self._write(mine)))
            written = {rank: each for rank, each in enumerate(gathered) if each is not None}
            for _, problem in written.values():
                if problem is not None:
                    raise CannotWrite(problem)
            self._load(written[first][0])
            self._world.barrier()  # all have read them
        self._version = version

    def sleep(self) -> None:
        """Has vLLM leave its part of the GPU to the training until ``follow``; on a CPU, where it can't, nothing."""
        engine: Any = self._engine
        if engine is not None and engine.sleeps:
            self._version = _NONE
            engine.sleep()

    def _with_room(self, positions: int) -> Backend:
        """The engine with the weights of the last ``follow``, where it starts anew for a conversation that has grown
        too."""
        before = self._engine
        engine: Any = super()._with_room(positions)
        if engine is not before and self._world.device != "cpu" and not engine.sleeps:
            logger.warning("vLLM can't sleep on this platform: it keeps its memory while the policy learns")
        if engine is not before and self._version != _NONE:
            with self._in_memory() as folder:
                if (problem := self._write(folder)) is not None:
                    raise CannotWrite(problem)
                self._load(folder)
        return engine  # type: ignore[no-any-return]

    def _in_memory(self) -> AbstractContextManager[Path]:
        return _in_memory(self._folder, self._world.rank, self._module)

    def _prompt_tokens(self, problem: Problem) -> int:
        """Of a problem as it stands; 1 where an environment of the user's own makes a prompt of it."""
        try:
            return len(self.prompt_ids(problem))
        except UsageError:
            return 1

    def _write(self, folder: Path) -> str | None:
        """Writes the weights; returns what is wrong."""
        try:
            write_weights(self._module, folder, self._dtype)
        except OSError as problem:
            return f"can't write the policy's weights for vLLM in {folder}: {problem.strerror or problem}"
        return None

    def _load(self, folder: Path) -> None:
        engine: Any = self._engine
        engine.load_weights(folder)


@contextmanager
def _in_memory(training: Path, rank: int, module: Any) -> Iterator[Path]:
    """A folder for the weights of a module, written by the process of this rank, in memory, or in the training's folder
    where there is no room, or somebody else's file of its name. It is removed in the end, and in the beginning: a
    training that goes on has the same one, and may have been killed."""
    folder = _place(training, rank)
    shutil.rmtree(folder, ignore_errors=True)
    needed = sum(each.numel() * each.element_size() for each in module.parameters())
    taken = os.path.lexists(folder)  # by somebody else, who put it there
    if taken or not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _SPARE * needed:
        folder = training / f".weights-{folder.name.rpartition('-')[2]}"
        why = f"{_MEMORY}: a file of somebody else's is in the way of" if taken else f"{_MEMORY} has no room for"
        logger.warning("%s the policy's weights; vLLM reads them from %s", why, folder.parent)
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(training: Path, rank: int) -> Path:
    """The folder in memory for weights that the process of this rank writes."""
    digest = hashlib.sha256(f"{os.path.realpath(training)}\0policy {rank}".encode()).hexdigest()[:16]
    return _MEMORY / f"gpuherd-{os.getuid()}-{digest}"


def write_weights(module: Any, folder: Path, dtype: str | None = None) -> None:
    """Writes a causal model's weights as transformers saves them, adapters merged into theirs.

    Args:
        module: transformers' or PEFT's, whole in this process. It stays as it is, to the bit.
        dtype: of the numbers that are written; None: as they are.

    Raises OSError.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    folder.mkdir(mode=0o700)
    model = module.get_base_model() if hasattr(module, "peft_type") else module
    model.save_pretrained(folder, state_dict=merged_weights(model, dtype))


def merged_weights(model: Any, dtype: str | None = None) -> dict[str, Tensor]:
    """The weights and persistent buffers of a causal model by transformers' names, on the CPU, as copies.

    Those of layers under an adapter are merged with it, by PEFT, and put back.
    """
    import torch

    kind = None if dtype is None else getattr(torch, dtype)

    def copied(each: Tensor) -> Tensor:
        return each.detach().to("cpu", kind if each.is_floating_point() else None, copy=True)

    adapted, found = _adapted(model), {}
    with torch.no_grad():
        for name, each in _tensors(model):
            if not name.startswith(tuple(f"{layer}." for layer in adapted)):
                found[name] = copied(each)
        for name, layer in adapted.items():
            base = layer.get_base_layer()
            originals = [(each, each.detach().clone()) for _, each in _tensors(base)]
            layer.merge()
            try:
                found |= {f"{name}.{own}": copied(each) for own, each in _tensors(base)}
            finally:
                layer.unmerge()
                for each, original in originals:
                    each.copy_(original)
    return found


def _adapted(model: Any) -> dict[str, Any]:
    """The layers of a model that have an adapter, by name. Raises UsageError for one that is no LoRA of PEFT's."""
    with suppress(ImportError):
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        layers = {name: each for name, each in model.named_modules() if isinstance(each, BaseTunerLayer)}
        for name, each in model.named_modules():
            if isinstance(each, AuxiliaryTrainingWrapper):
                raise UsageError(f"generation.backend=vllm: the adapter trains {name} besides, which can't be merged")
        return layers
    return {}


def _tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once."""
    yield from module.named_parameters()
    for place, part in module.named_modules():
        for name, each in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{place}.{name}" if place else name, each
