"""Loads one model, checks it, computes one prompt: ``python -m gpuherd.models.load.worker MODEL --json report.json``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does as a job of a queue. Its exit code
(``ExitCode``) says whether another try can help; what it found is its log, and the JSON file, written whole or not at
all.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.atomic import atomic_write
from gpuherd.engines import progress
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError
from gpuherd.gpus.visible import described
from gpuherd.models.load.options import Device, LoadOptions
from gpuherd.models.place.request import whole
from gpuherd.models.plan.workload import Workload
from gpuherd.options import Parser, add_options, build, option
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    from gpuherd.models.load.loading import Loaded
    from gpuherd.models.load.options import LoadRequest
    from gpuherd.models.plan.result import Usage


# ---- one computation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """What a prompt of random tokens came to.

    Attributes:
        sequences, tokens: how many, and how long each.
        seconds: for all of it, the first time.
        finite: whether all numbers that came out are finite.
        peaks: GPU -> most bytes that CUDA's allocator had given out at once, weights included; empty off GPUs.
        planned: GPU -> bytes that the plan expects there at most, without the context and reserve of other libraries.
    """

    sequences: int
    tokens: int
    seconds: float
    finite: bool
    peaks: Mapping[int, int]
    planned: Mapping[int, int]

    @property
    def within(self) -> bool:
        """Whether no GPU took more than was planned."""
        return all(self.peaks[gpu] <= self.planned[gpu] for gpu in self.peaks if gpu in self.planned)

    def sentence(self) -> str:
        """The trial in words."""
        told = f"a prompt of {self.sequences} x {self.tokens} tokens took {self.seconds:.1f} s"
        if not self.finite:
            told += "; NOT ALL NUMBERS THAT CAME OUT ARE FINITE"
        return told if self.within else f"{told}; IT TOOK MORE MEMORY THAN PLANNED"

    def as_json(self) -> dict[str, Any]:
        """The trial as plain JSON values; sizes in bytes."""
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "finite": self.finite,
            "peak_bytes": {str(gpu): size for gpu, size in self.peaks.items()},
            "planned_bytes": {str(gpu): size for gpu, size in self.planned.items()},
            "within_plan": self.within,
        }


def try_out(loaded: Loaded, workload: Workload, planned: Mapping[int, int]) -> Trial:
    """Computes one prompt of random tokens, of the workload's size or the longest that the model takes.

    Args:
        planned: bytes expected on each GPU at most; see ``Trial``.
    """
    import torch

    gpus = _real_gpus(loaded)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    tokens = min(workload.prompt_tokens, _longest(loaded.model.config))
    words = _inputs(loaded, workload.batch, tokens)
    started = time.monotonic()
    with torch.inference_mode():
        answer = loaded.model(**words)
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    out = getattr(answer, "logits", None)
    out = answer.last_hidden_state if out is None else out
    return Trial(
        sequences=workload.batch,
        tokens=tokens,
        seconds=time.monotonic() - started,
        finite=bool(torch.isfinite(out).all()),
        peaks={gpu: torch.cuda.max_memory_allocated(gpu) for gpu in gpus},
        planned={gpu: planned[gpu] for gpu in gpus if gpu in planned},
    )


def _real_gpus(loaded: Loaded) -> list[int]:
    used: set[Device] = set(loaded.report.device_map.values())
    return [] if loaded.report.simulated else sorted(device for device in used if isinstance(device, int))


def _longest(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else 1 << 20


def _inputs(loaded: Loaded, sequences: int, tokens: int) -> dict[str, Any]:
    """Random token ids with a mask, and what else the model's class wants."""
    import torch

    model, config = loaded.model, loaded.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (sequences, tokens), generator=random).to(loaded.input_device)
    words: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None) or 0
        words["decoder_input_ids"] = torch.full((sequences, 1), start, device=ids.device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        # As generating does: of a prompt only the last position's logits are wanted.
        words["logits_to_keep"] = 1
    return words


DESCRIPTION = """\
Loads a model as 'gpuherd plan' plans it, checks where everything lies, and computes one prompt.

examples:
  CUDA_VISIBLE_DEVICES=0,1 python -m gpuherd.models.load.worker meta-llama/Llama-3.1-8B --dtype int8
  python -m gpuherd.models.load.worker ./small --gpus 4x40GB --parallel layers --json report.json
"""

logger = logging.getLogger("gpuherd.models.load")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(LoadOptions):
    """What the worker is told."""

    batch: int = option(1, help="sequences at once", parse=whole, group="workload")
    prompt_tokens: int = option(512, help="tokens of a prompt", parse=whole, group="workload")
    new_tokens: int = option(64, help="tokens of an answer", parse=whole, group="workload")
    simulate: bool = option(
        False, help="pretend the GPUs: their blocks go to the CPU's memory and are checked all the same", group="model"
    )
    no_trial: bool = option(False, help="load and check only, compute nothing", group="workload")
    json: str | None = option(None, help="write the report there as JSON", metavar="FILE", group="output")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is the last line of its log."""
    parser = Parser(prog="python -m gpuherd.models.load.worker", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a weight file, or a Hugging Face id")
    add_options(parser, WorkerOptions)
    args, unknown = parser.parse_known_args(argv)
    parser.reject_unknown(unknown)
    try:
        _load(args.model, build(WorkerOptions, args), sys.argv[1:] if argv is None else argv)
    except GpuherdError as problem:
        logger.error("error: %s", problem)
        return problem.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as problem:
        logger.error("%s", traceback.format_exc())
        return ExitCode.OUT_OF_MEMORY if is_out_of_memory(problem) else ExitCode.FAILED
    return ExitCode.OK


def _load(model: str, options: WorkerOptions, words: Sequence[str]) -> None:
    """Loads, checks, tries out, writes the report. ``words``: those of the command line."""
    from gpuherd.models.load.options import load_request

    workload = Workload(options.batch, options.prompt_tokens, options.new_tokens)
    logger.info("Model: %s", model)
    logger.info("%s", described(os.environ))
    progress.report(0, None, "plan")
    request = load_request(model, options, workload, simulate=options.simulate)
    loaded, planned = _part(request, words) if options.parallel == "tensor" else _whole(request)
    found: dict[str, Any] = {**loaded.report.as_json(), "trial": None}
    if not options.no_trial:
        progress.report(0, None, "compute")
        trial = try_out(loaded, workload, planned)
        logger.info("%s", trial.sentence())
        found["trial"] = trial.as_json()
    if options.parallel == "tensor":
        from gpuherd.models.load.tensor_parallel import leave

        leave()
    if options.json is not None and os.environ.get("RANK", "0") == "0":
        _write(Path(options.json), found)


def _whole(request: LoadRequest) -> tuple[Loaded, Mapping[int, int]]:
    """The whole model, and what the plan expects on each GPU at most, in bytes."""
    from gpuherd.models.load.loading import load_prepared
    from gpuherd.models.load.prepare import prepare

    ready = prepare(request)
    progress.report(0, None, "load")
    return load_prepared(ready), {gpu: _expected(load.usage) for gpu, load in (ready.placement.loads or {}).items()}


def _part(request: LoadRequest, words: Sequence[str]) -> tuple[Loaded, Mapping[int, int]]:
    """This rank's part of a model whose layers are divided; in a process that is none yet: becomes all ranks."""
    from gpuherd.models.load.tensor_parallel import load_tensor_parallel, relaunch, this_rank

    rank = this_rank(os.environ)
    if rank is None:
        relaunch(request, ["gpuherd.models.load.worker", *words])
        return _whole(replace(request, parallel=None))
    progress.report(0, None, "load")
    loaded, usage = load_tensor_parallel(request, rank)
    return loaded, {rank.local: _expected(usage)}


def _expected(usage: Usage) -> int:
    """What the model itself takes at most: without the context and the reserve of other libraries."""
    return usage.total - usage.context - usage.reserve


def _write(target: Path, found: Mapping[str, Any]) -> None:
    try:
        atomic_write(target, (json.dumps(found, indent=2) + "\n").encode("utf-8"))
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror}") from None
    logger.info("Saved: %s", target)


if __name__ == "__main__":
    # A log that is read while the worker runs must not wait in a buffer.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.exit(main())
