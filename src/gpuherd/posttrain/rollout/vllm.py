"""A policy that vLLM decodes, where vLLM is installed: while data is collected and while a policy trains
(``generation.backend: vllm``), and in evaluations (``evaluation.backend: vllm``).

Draws have seeds of their own, keyed by (seed, prefix, sample) as in ``Sampler``, but they are vLLM's draws, and vLLM's
log-probs are not the same to the last bit in another batch: where two tokens are that close, a draw may come out
otherwise for another division into jobs.

Log-probs are those that vLLM reports. Of the whole law (top_p 1, top_k 0) they are at the sampling temperature. Of cut
draws it reports either those of the cut law or those at temperature 1; the latter are kept where the temperature is 1,
and none else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.lm.backend import Backend
from gpuherd.lm.tokens import end_tokens
from gpuherd.models.memory.weights import Precision as Form
from gpuherd.posttrain.rollout.sampler import (
    Continuation,
    Prefix,
    RolloutBackend,
    check_samples,
    continuation_of,
    generations_of,
)
from gpuherd.posttrain.types import Policy, Precision, Sampling

logger = logging.getLogger(__name__)

_STEP = 256  # positions: an engine has room for whole steps, so that a longer prompt seldom needs another engine
_MOST_SHARE = 0.95

Start = Callable[[int], Backend]  # an engine with room for so many positions

COLLECTING, EVALUATING = "generation.backend", "evaluation.backend"  # the keys that ask for it


class VllmSampler(RolloutBackend):
    """A model, with a LoRA adapter or without, decoded by vLLM. The engine starts when it is first used, and again
    where a longer prompt comes.

    Raises UsageError for a policy with a guide, MissingExtra where vLLM is not installed, and what reading the model's
    tokenizer, configuration and adapter raises.
    """

    _sleeps: ClassVar[bool] = False  # the engine can be made to sleep, on GPUs
    _scratch: Sequence[Path] = ()  # folders in memory that weights are handed over in

    def __init__(
        self,
        policy: Policy,
        precision: Precision,
        device: str,
        sampling: Sampling,
        *,
        start: Start | None = None,
        key: str = COLLECTING,
    ):
        """``start`` starts the engine; None: vLLM's on ``device``. ``key``: what asked for it, for messages."""
        refuse(policy, key)
        if start is None:
            require_vllm(policy.model, precision, key)
        tokenizer, end_ids, self._most_places, adapter, held = _read(policy)
        if precision.dtype is None and held.computes_in is held:
            precision = replace(precision, dtype=held.value)  # of float32 vLLM would take half as wide numbers
        super().__init__(tokenizer, end_ids, sampling)
        self._tempered = _is_whole(sampling)
        self._start = start or (lambda positions: self._started(policy.model, adapter, precision, device, positions))
        self._engine: Backend | None = None
        self._positions = 0

    def continuations(
        self,
        prefixes: Sequence[Prefix | tuple[str, Sequence[int], Sequence[int]]],
        samples: int = 1,
        *,
        first_sample: int = 0,
        greedy: bool = False,
    ) -> list[tuple[Continuation, ...]]:
        """See ``RolloutBackend``; vLLM makes its own batches of all that is given."""
        check_samples(samples, greedy=greedy)
        if not prefixes:
            return []
        prompts = [self._asked(Prefix(*each)) for each in prefixes]
        longest = max(len(each.token_ids) for each in prompts)
        if self._most_places is not None and longest >= self._most_places:
            raise UsageError(f"a prompt has {longest} tokens, and the model has places for {self._most_places}")
        needed = max(len(each.token_ids) + (each.most or self.sampling.max_new_tokens) for each in prompts)
        how = self._decoding(samples, first_sample, greedy=greedy, tempered=self._tempered)
        answers = self._with_room(needed).decode(prompts, how)
        found = [tuple(continuation_of(each) for each in generations_of(answer)) for answer in answers]
        return (
            found
            if reports_log_probs(self.sampling, greedy=greedy)
            else [tuple(map(_without_log_probs, each)) for each in found]
        )

    @property
    def places(self) -> int | None:
        """See ``RolloutBackend``."""
        return self._most_places

    def release(self) -> None:
        """Ends the engine, whose memory is then free for other models. The next continuation starts another."""
        if (close := getattr(self._engine, "close", None)) is not None:
            close()
        self._engine, self._positions = None, 0

    def _with_room(self, positions: int) -> Backend:
        """The engine, started anew where it has no room for so many positions."""
        rounded = _STEP * math.ceil(positions / _STEP)
        positions = rounded if self._most_places is None else min(rounded, self._most_places)
        if self._engine is None or positions > self._positions:
            if self._engine is not None:
                logger.info("vLLM starts again with room for %d tokens, %d before", positions, self._positions)
            self.release()
            self._engine, self._positions = self._start(positions), positions
        return self._engine

    def _started(
        self, model: str, adapter: tuple[str, int] | None, precision: Precision, device: str, positions: int
    ) -> Backend:
        from gpuherd.lm.vllm import VllmBackend
        from gpuherd.models.load.identity import reference

        share = None if device == "cpu" else planned_share(model, precision.dtype, self.sampling, positions)
        return VllmBackend(
            model,
            reference(model),
            _options(precision, device),
            positions=positions,
            rows=self.sampling.batch_size,
            exact=False,
            tempered=self._tempered,
            share=share,
            attention=precision.attention,
            adapter=adapter,
            gpu=None if device == "cpu" else int(device.partition(":")[2] or 0),
            sleeps=self._sleeps and device != "cpu",
            scratch=self._scratch,
        )


def sampling_precision(training: Precision) -> Precision:
    """Of vLLM's copy of a policy in training: weights in the dtype that the training's passes compute in."""
    return replace(training, dtype=training.amp_dtype or training.dtype, amp_dtype=None)


def require_vllm(model: str, precision: Precision, key: str = COLLECTING) -> None:
    """Raises MissingExtra where vLLM is not installed, UsageError for a model in 8 bits, which it can't load."""
    from gpuherd.lm.vllm import require

    require(_options(precision, "cpu"), model, asked_by=f"{key}=vllm")


def refuse(policy: Policy, key: str = COLLECTING) -> None:
    """Raises UsageError for a policy that a classifier guides."""
    if policy.guide is not None:
        raise UsageError(f"vLLM decodes no guided policy ({policy.guide.classifier}); set {key}=hf")


def refuse_cut(sampling: Sampling, algorithm: str, key: str, block: str) -> None:
    """Raises UsageError for cut draws, of an algorithm that learns by the log-probs of draws.

    Args:
        block: where top_p and top_k stand.
    """
    if not _is_whole(sampling):
        raise UsageError(
            f"{key}=vllm: of cut draws vLLM does not report the log-probs of the whole law, which {algorithm} learns "
            f"by; set {block}.top_p=1 and {block}.top_k=0"
        )


def reports_log_probs(sampling: Sampling, *, greedy: bool) -> bool:
    """Whether vLLM's log-probs of such continuations are at the sampling temperature: of cut draws it reports those at
    temperature 1, and of greedy answers, which have no temperature, too."""
    return sampling.temperature == 1 or (_is_whole(sampling) and not greedy)


def planned_share(model: str, dtype: str | None, sampling: Sampling, positions: int) -> float:
    """The part of its GPU that vLLM takes at its start: what the memory plan of the job counts for the model, the cache
    of ``sampling.batch_size`` sequences of ``positions`` tokens, and a pass. Raises JobCannotFit.
    """
    from gpuherd.gpus.query import machine
    from gpuherd.gpus.visible import visible_now
    from gpuherd.models.memory.kv_cache import Workload
    from gpuherd.models.place.inventory import idle_gpus
    from gpuherd.models.place.resources import read_with_precision, resources_of

    gpus = idle_gpus(visible_now(machine(processes=False).gpus))[:1]
    new = min(sampling.max_new_tokens, positions - 1)
    load = Workload(sampling.batch_size, positions - new, new)
    architecture, precision = read_with_precision(model, dtype)
    planned = resources_of(architecture, precision, load, gpus, parallel="replica", most=1)
    return share_of(planned.memory_mb << 20, gpus[0].total) if gpus else _MOST_SHARE


def share_of(needed: int, total: int) -> float:
    """The share of a GPU of ``total`` bytes that holds ``needed``, in thousandths upwards, at most 0.95.

    >>> share_of(10 << 30, 80 << 30), share_of(79 << 30, 80 << 30)
    (0.125, 0.95)
    """
    return min(_MOST_SHARE, math.ceil(1000 * needed / total) / 1000)


def _is_whole(sampling: Sampling) -> bool:
    return sampling.top_p == 1 and sampling.top_k == 0


def _options(precision: Precision, device: str) -> Any:
    from gpuherd.models.load.options import ModelOptions
    from gpuherd.models.place.request import parse_precision

    dtype = None if precision.dtype is None else parse_precision(precision.dtype)
    return ModelOptions(dtype=dtype, device_map="cpu" if device == "cpu" else None)


def _read(policy: Policy) -> tuple[Any, tuple[int, ...], int | None, tuple[str, int] | None, Form]:
    """Tokenizer (the adapter's, where that brings one), end tokens and places of a policy, its adapter's folder and
    rank, and the form of its weights; without weights. Raises MissingModel, BadModel, UsageError."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from gpuherd.models.load.options import LoadRequest
    from gpuherd.models.load.prepare import located, tokenizer_folder
    from gpuherd.models.place.resources import read_with_precision

    folder, adapter = located(LoadRequest(policy.model, adapter=policy.adapter))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(folder, adapter), local_files_only=True)
    config = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except OSError:
        generation = None
    found = end_tokens(tokenizer, config, generation)
    if not found.ids:
        raise UsageError("neither the model's configs nor its tokenizer name a token that ends an answer (eos_token)")
    architecture, held = read_with_precision(policy.model, None)
    ranked = None if adapter is None else (str(adapter), _rank(adapter))
    return tokenizer, found.ids, architecture.max_tokens, ranked, held


def _rank(adapter: Path) -> int:
    """The largest rank of an adapter. Raises BadModel, UsageError for a kind of adapter that vLLM does not know."""
    from gpuherd.models.checkpoints.open import ADAPTER_CONFIG, read_json

    config = read_json(adapter / ADAPTER_CONFIG)
    for name, plain in (("use_dora", False), ("modules_to_save", None), ("bias", "none")):
        if config.get(name, plain) not in (plain, None, []):
            raise UsageError(
                f"{adapter}: vLLM knows no adapter with {name}={config[name]}; merge it first with 'gpuherd merge', or "
                "decode by hf"
            )
    return max(int(each) for each in (config.get("r", 1), *(config.get("rank_pattern") or {}).values()))


def _without_log_probs(continuation: Continuation) -> Continuation:
    return replace(continuation, log_probs=(None,) * len(continuation.ids))
