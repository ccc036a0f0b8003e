"""The process that vLLM runs in; ``vllm`` starts it. Standard library and vLLM alone, so that any Python that has vLLM
can run it, of an environment without gpuherd too.

    python -P vllm_process.py SOCKET PARENT

Requests and replies are pickled tuples and dictionaries of plain values, through the socket. What vLLM prints goes to
standard error. The process ends when the socket is closed, and with the process PARENT.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_POLICY = "policy"  # the one adapter that there is
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM makes room for

Request = tuple[Sequence[int], Mapping[str, Any]]  # a prompt's token ids, and the arguments of its ``SamplingParams``
# Of each answer to a prompt the token ids and their log-probs; None in place of log-probs where vLLM gave none.
Answers = list[tuple[list[int], list[float] | None]]


def main(descriptor: int, parent: int) -> None:
    """Answers requests until the socket is closed."""
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    served = _Served()
    with Connection(descriptor) as channel, suppress(EOFError, ConnectionError):
        while True:
            name, arguments = channel.recv()
            try:
                reply = {"made": getattr(served, name)(*arguments)}
            except BaseException as problem:
                traceback.print_exc()
                kinds = [each.__name__ for each in type(problem).__mro__]
                reply = {"problem": f"{type(problem).__name__}: {problem}", "kinds": kinds}
            channel.send(reply)
    served.close()
    os.killpg(0, signal.SIGKILL)  # the session is this process's own: nothing that vLLM started is left


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is busy with, when the one that started it has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


class _Served:
    """An engine, and the requests to it."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._lora: Any = None

    def start(self, settings: Mapping[str, Any], adapter: tuple[str, int] | None) -> dict[str, str]:
        """Starts the engine by the arguments of ``vllm.LLM``; returns how it computes.

        Args:
            adapter: the folder and the rank of one that all answers are given with.
        """
        import torch
        import vllm

        more: dict[str, Any] = {}
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            folder, rank = adapter
            more = {"enable_lora": True, "max_lora_rank": next((each for each in _RANKS if each >= rank), rank)}
            self._lora = LoRARequest(_POLICY, 1, folder)
        self._llm = vllm.LLM(**settings, **more)
        dtype = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return {"vllm": str(vllm.__version__), "torch": str(torch.__version__), "dtype": dtype}

    def decode(self, requests: Sequence[Request]) -> list[Answers]:
        """The answers to each prompt, in the order of their numbers."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": list(ids)} for ids, _ in requests],
            [SamplingParams(**settings) for _, settings in requests],
            use_tqdm=False,
            lora_request=self._lora,
        )
        return [[_answer(each) for each in sorted(output.outputs, key=_number)] for output in outputs]

    def load_weights(self, folder: str) -> None:
        """Puts the weights of a folder, by the names of its checkpoint, in the place of those in memory. What was
        computed with the old ones is forgotten."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM can't forget the prompts that it has read with older weights")

    def close(self) -> None:
        """Ends the engine."""
        if self._llm is not None:
            with suppress(Exception):
                self._llm.llm_engine.engine_core.shutdown()


def _number(output: Any) -> int:
    return int(output.index)


def _answer(output: Any) -> tuple[list[int], list[float] | None]:
    ids = list(output.token_ids)
    if output.logprobs is None:
        return ids, None
    return ids, [each[token].logprob for token, each in zip(ids, output.logprobs, strict=True)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
