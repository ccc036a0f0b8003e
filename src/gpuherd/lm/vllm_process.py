"""The process that vLLM runs in; ``vllm`` starts it. Standard library and vLLM alone, so that any Python that has vLLM
can run it, of an environment without gpuherd too.

    python -P vllm_process.py SOCKET PARENT

Requests and replies are pickled tuples and dictionaries of plain values, through the socket. While answers are computed
it sends None now and then, as a sign that the engine goes on. What vLLM prints goes to standard error. The process ends
when the socket is closed, and with the process PARENT, whose files in memory it removes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

_POLICY = "policy"  # the one adapter that there is
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM makes room for
_SIGN_S = 1.0  # between two signs that it goes on
# Level 2: weights and cache are given up, and buffers kept (gpu_worker.sleep); weights come anew before it is used.
_SLEEP = 2

Request = tuple[Sequence[int], Mapping[str, Any]]  # a prompt's token ids, and the arguments of its ``SamplingParams``
# Of each answer to a prompt the token ids and their log-probs; None in place of log-probs where vLLM gave none.
Answers = list[tuple[list[int], list[float] | None]]


def main(descriptor: int, parent: int) -> None:
    """Answers requests until the socket is closed."""
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    channel = Connection(descriptor)
    served = _Served(lambda: channel.send(None))
    threading.Thread(target=_end_with, args=(parent, served), daemon=True).start()
    with channel, suppress(EOFError, ConnectionError):
        while True:
            name, arguments = channel.recv()
            try:
                reply = {"made": getattr(served, name)(*arguments)}
            except BaseException as problem:
                traceback.print_exc()
                kinds = [each.__name__ for each in type(problem).__mro__]
                version = getattr(sys.modules.get("vllm"), "__version__", None)
                reply = {"problem": f"{type(problem).__name__}: {problem}", "kinds": kinds, "vllm": version}
            channel.send(reply)
    served.close()
    served.clean()
    os.killpg(0, signal.SIGKILL)  # the session is this process's own: nothing that vLLM started is left


def _end_with(parent: int, served: _Served) -> None:
    """Ends this process, whatever it is busy with, when the one that started it has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    served.clean()
    os.killpg(0, signal.SIGKILL)


class _Served:
    """An engine, and the requests to it. ``sign``: called while answers are computed."""

    def __init__(self, sign: Callable[[], None]) -> None:
        self._sign = sign
        self._llm: Any = None
        self._lora: Any = None
        self._asleep = False
        self._scratch: Sequence[str] = ()

    def start(
        self, settings: Mapping[str, Any], adapter: tuple[str, int] | None, sleeps: bool, scratch: Sequence[str]
    ) -> dict[str, Any]:
        """Starts the engine by the arguments of ``vllm.LLM``; returns how it computes.

        Args:
            adapter: the folder and the rank of one that all answers are given with.
            sleeps: the engine is to sleep where the platform can; the reply says whether it can.
            scratch: folders that weights are handed over in.
        """
        self._scratch = scratch
        import torch
        import vllm

        more: dict[str, Any] = {}
        if sleeps := sleeps and _can_sleep():
            more["enable_sleep_mode"] = True
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            folder, rank = adapter
            more |= {"enable_lora": True, "max_lora_rank": next((each for each in _RANKS if each >= rank), rank)}
            self._lora = LoRARequest(_POLICY, 1, folder)
        self._llm = vllm.LLM(**settings, **more)
        dtype = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")
        about = {"vllm": str(vllm.__version__), "torch": str(torch.__version__), "dtype": dtype}
        return {**about, "sleeps": sleeps}

    def decode(self, requests: Sequence[Request]) -> list[Answers]:
        """The answers to each prompt, in the order of their numbers."""
        from vllm import SamplingParams

        params = [SamplingParams(**settings) for _, settings in requests]
        with self._signalling():
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(ids)} for ids, _ in requests],
                params,
                use_tqdm=False,
                lora_request=self._lora,
            )
        return [[_answer(each) for each in sorted(output.outputs, key=_number)] for output in outputs]

    def load_weights(self, folder: str) -> None:
        """Puts the weights of a folder, by the names of its checkpoint, in the place of those in memory, and wakes an
        engine that sleeps. What was computed with the old ones is forgotten."""
        if self._asleep:  # the cache comes last: reading weights takes memory too
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM can't forget the prompts that it has read with older weights")

    def sleep(self) -> None:
        """Gives up the memory of weights and cache, until ``load_weights``."""
        self._llm.sleep(level=_SLEEP)
        self._asleep = True

    def close(self) -> None:
        """Ends the engine."""
        if self._llm is not None:
            with suppress(Exception):
                self._llm.llm_engine.engine_core.shutdown()

    def clean(self) -> None:
        """Removes what a parent that was killed has left of weights that it handed over."""
        for each in self._scratch:
            shutil.rmtree(each, ignore_errors=True)

    @contextmanager
    def _signalling(self) -> Iterator[None]:
        """Signs are sent while the engine makes steps."""
        engine = self._llm.llm_engine
        step, last = engine.step, time.monotonic()

        def signalling() -> Any:
            nonlocal last
            if time.monotonic() > last + _SIGN_S:
                last = time.monotonic()
                self._sign()
            return step()

        engine.step = signalling
        try:
            yield
        finally:
            del engine.step


def _can_sleep() -> bool:
    """Whether vLLM can give its memory away on this platform, and take it back."""
    from vllm.platforms import current_platform as platform

    if not platform.is_sleep_mode_available():
        return False
    return not platform.is_cuda_alike() or bool(platform.is_cumem_allocator_available())


def _number(output: Any) -> int:
    return int(output.index)


def _answer(output: Any) -> tuple[list[int], list[float] | None]:
    ids = list(output.token_ids)
    if output.logprobs is None:
        return ids, None
    return ids, [each[token].logprob for token, each in zip(ids, output.logprobs, strict=True)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
