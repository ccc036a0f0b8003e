"""Answers by vLLM, where it is installed: the same answers and log-probs, by its own batching.

By vLLM's documented interface for offline inference: ``LLM.generate`` with token ids, one ``SamplingParams`` for the
greedy answer and one for the draws of each question; ``logprobs=0`` gives the chosen token's alone, and
``logprobs_mode="raw_logprobs"`` those of the model itself, "processed_logprobs" those at the sampling temperature.
Nothing of a checkpoint's generation config is taken over.

Its draws come from its own generators: reproducible by the seed with the same version, not those of the other engine.
Of n draws with a seed, vLLM gives draw i the seed + i, so that a draw is fixed by the run's seed, the question and its
number, however many are drawn in one call.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from multiprocessing import active_children
from typing import Any

from gpuherd.errors import MissingExtra, UsageError
from gpuherd.gpus.visible import named_in, setting
from gpuherd.lm.backend import Decoded, Decoding, Generation, PromptTokens, as_float32
from gpuherd.lm.decoding import DecodingRow
from gpuherd.lm.tokens import Detokenizer
from gpuherd.models.checkpoints.hub import repo_of
from gpuherd.models.load.options import ModelOptions, requested_precision
from gpuherd.models.memory.weights import Precision, split_precision
from gpuherd.models.names import ModelRef
from gpuherd.models.place.request import agreed_precision

_ENDING_S = 20.0  # that vLLM's processes have to end by themselves
_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}


class VllmBackend:
    """A model in vLLM, over all GPUs that this process sees. ``exact``: a sequence at a time.

    Raises MissingExtra where vLLM is not installed, UsageError for options that it has no counterpart of.
    """

    def __init__(
        self,
        model: str,
        ref: ModelRef,
        options: ModelOptions,
        *,
        positions: int,
        rows: int,
        exact: bool,
        tempered: bool = False,
        share: float | None = None,
    ):
        """Starts the engine.

        Args:
            model, ref: as the user wrote it, and the folder or id that it names.
            positions: tokens of the longest prompt and its answer together.
            rows: sequences at once.
            tempered: log-probs are recorded at the sampling temperature; ``Decoding.tempered`` must say the same.
            share: the part of each GPU's memory that vLLM takes at its start; None: its default.
        """
        require(options, model)
        try:
            import vllm
        except ImportError as problem:
            raise _missing(str(problem)) from None
        self._vllm = vllm
        before = {each.pid for each in active_children()}
        self._llm: Any = vllm.LLM(
            **engine_settings(
                model,
                ref,
                options,
                positions=positions,
                rows=rows,
                exact=exact,
                gpus=visible_gpus(os.environ),
                tempered=tempered,
                share=share,
            )
        )
        self._processes = [each for each in active_children() if each.pid not in before]
        self._tempered = tempered
        self._tokenizer: Any = self._llm.get_tokenizer()

    def decode(self, prompts: Sequence[PromptTokens], how: Decoding) -> Sequence[Decoded]:
        """See ``Backend``. Raises UsageError where log-probs are wanted at another temperature than was configured."""
        if how.tempered != self._tempered:
            raise UsageError(f"vLLM was started with tempered={self._tempered}: it can't record other log-probs")
        asked: list[tuple[int, Any]] = []
        for place, prompt in enumerate(prompts):
            if how.greedy:
                asked.append((place, self._vllm.SamplingParams(**greedy_settings(how, prompt.most))))
            if how.samples:
                asked.append((place, self._vllm.SamplingParams(**drawn_settings(how, prompt.id, prompt.most))))
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompts[place].token_ids)} for place, _ in asked],
            [settings for _, settings in asked],
            use_tqdm=False,
        )
        greedy: dict[int, Generation] = {}
        drawn: dict[int, list[Generation]] = {}
        for (place, settings), output in zip(asked, outputs, strict=True):
            found = [
                generation_of(self._tokenizer, each.token_ids, chosen(each.token_ids, each.logprobs), how)
                for each in sorted(output.outputs, key=lambda each: int(each.index))
            ]
            if settings.temperature == 0:
                greedy[place] = found[0]
            else:
                drawn[place] = found
        return [Decoded(greedy.get(place), tuple(drawn.get(place, ()))) for place in range(len(prompts))]

    def close(self) -> None:
        """Ends the engine's processes, whose memory is then free; nothing can be decoded any more.

        Without it they outlive the last reference to the engine.
        """
        self._llm.llm_engine.engine_core.shutdown()
        for process in self._processes:  # shutting down asks them to end, and does not wait for it
            process.join(_ENDING_S)
            if process.is_alive():
                process.kill()
                process.join()

    def record(self) -> Mapping[str, Any]:
        """See ``Backend``."""
        import torch

        dtype = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return {
            "engine": "vllm",
            "versions": {"vllm": str(self._vllm.__version__), "torch": str(torch.__version__)},
            "dtype": dtype,
        }


def engine_settings(
    model: str,
    ref: ModelRef,
    options: ModelOptions,
    *,
    positions: int,
    rows: int,
    exact: bool,
    gpus: int,
    tempered: bool = False,
    share: float | None = None,
) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``; see ``VllmBackend``."""
    precision = _precision(options, model)
    quantised = precision is not None and precision.is_quantised
    return {
        "model": str(ref.path) if ref.path is not None else repo_of(ref),
        "revision": ref.revision,
        "dtype": "auto" if precision is None or quantised else _DTYPES.get(precision, "auto"),
        "quantization": "bitsandbytes" if quantised else None,
        "tensor_parallel_size": max(1, gpus),
        "max_model_len": positions,
        "max_num_seqs": 1 if exact else rows,
        # What another question has left in the cache would change how this one is computed.
        "enable_prefix_caching": not exact,
        "trust_remote_code": options.trust_remote_code,
        "logprobs_mode": "processed_logprobs" if tempered else "raw_logprobs",
        "generation_config": "vllm",
        **({} if share is None else {"gpu_memory_utilization": share}),
    }


def _precision(options: ModelOptions, model: str) -> Precision | None:
    """The form of the weights that was asked for, None for the checkpoint's own."""
    return agreed_precision(model, split_precision(model)[1], requested_precision(options.dtype, options.quantization))


def require(options: ModelOptions, model: str, *, asked_by: str = "--backend vllm") -> None:
    """Looks without importing it whether vLLM could be used. Raises MissingExtra where it is not installed, UsageError
    for what it places and loads in its own way.

    Args:
        asked_by: the option or key of the user, for the message.
    """
    for name in ("device_map", "allow_offload", "adapter", "merge_adapter"):
        if getattr(options, name) and (name, options.device_map) != ("device_map", "cpu"):
            raise UsageError(
                f"--{name.replace('_', '-')} is for --backend transformers; vLLM places the model itself"
                + ("; merge the adapter first with 'gpuherd merge'" if name == "adapter" else "")
            )
    if options.parallel not in (None, "auto", "tensor"):
        raise UsageError(f"--parallel {options.parallel} is for --backend transformers; vLLM divides each layer")
    if _precision(options, model) is Precision.INT8:
        # Its bitsandbytes quantises to 4 bits while it loads, whatever is wanted.
        raise UsageError(f"{model!r} in 8 bits is for --backend transformers; vLLM quantises to 4 bits alone")
    if importlib.util.find_spec("vllm") is None:
        raise _missing("it is not installed", asked_by)


def _missing(problem: str, asked_by: str = "--backend vllm") -> MissingExtra:
    return MissingExtra(
        f"{asked_by}: vLLM can't be imported ({problem}); install it as its own documentation says for the CUDA of "
        "this machine, or leave that out"
    )


def visible_gpus(environment: Mapping[str, str]) -> int:
    """How many GPUs this process was given; 1 where the environment does not say."""
    return 1 if setting(environment) is None else len(named_in(environment))


def greedy_settings(how: Decoding, most: int | None = None) -> dict[str, Any]:
    """The arguments of ``SamplingParams`` for the answer of the most probable tokens, of at most ``most``."""
    return {"temperature": 0.0, **_common(how, most)}


def drawn_settings(how: Decoding, prompt_id: str, most: int | None = None) -> dict[str, Any]:
    """The arguments of ``SamplingParams`` for the drawn answers to one prompt, numbered from ``how.first_sample``."""
    return {
        "n": how.samples,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k,
        "seed": seed_of(how.seed, prompt_id) + how.first_sample,
        **_common(how, most),
    }


def _common(how: Decoding, most: int | None) -> dict[str, Any]:
    return {
        "max_tokens": how.max_new_tokens if most is None else min(most, how.max_new_tokens),
        "logprobs": 0,
        "stop": list(how.stop),
        "stop_token_ids": list(how.end_ids),
        # Our own list of end tokens holds, whatever the checkpoint's tokenizer says besides.
        "ignore_eos": True,
        "skip_special_tokens": True,
    }


def seed_of(seed: int, prompt_id: str) -> int:
    """A prompt's seed: 31 bits of a hash of the run's seed and the question's id."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def chosen(token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None) -> list[float | None]:
    """The log-prob of each token that was chosen, as float32; None where it is not finite."""
    if logprobs is None:
        raise UsageError("vLLM gave no log-probs, which it was asked for; update it")
    found = [each[token].logprob for token, each in zip(token_ids, logprobs, strict=True)]
    return [as_float32(each) if math.isfinite(each) else None for each in found]


def generation_of(
    tokenizer: Any, token_ids: Sequence[int], log_probs: Sequence[float | None], how: Decoding
) -> Generation:
    """An answer as the other engine gives it: cut before the end token or the stop string, the text divided among its
    tokens."""
    row = DecodingRow(0, None, len(token_ids), Detokenizer(tokenizer), array("f"))
    for token, log_prob in zip(token_ids, log_probs, strict=True):
        row.take(token, log_prob, how)
        if row.ended:
            break
    return row.generation()
