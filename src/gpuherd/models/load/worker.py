"""Loads one model, checks it, computes one prompt: ``python -m gpuherd.models.load.worker MODEL --json report.json``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does as a job of a queue. Its exit code
(``ExitCode``) says whether another try can help; what it found is its log, and the JSON file, written whole or not at
all.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines import progress
from gpuherd.gpus.visible import described
from gpuherd.models.load.options import Device, LoadOptions
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.place.request import positive_integer
from gpuherd.options import Parser, add_options, build, option
from gpuherd.runs.files import write_values
from gpuherd.runs.worker import exit_code_of

if TYPE_CHECKING:
    from gpuherd.models.load.loading import Loaded


# ---- one computation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadTrial:
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
        text = f"a prompt of {self.sequences} x {self.tokens} tokens took {self.seconds:.1f} s"
        if not self.finite:
            text += "; NOT ALL NUMBERS THAT CAME OUT ARE FINITE"
        return text if self.within else f"{text}; IT TOOK MORE MEMORY THAN PLANNED"

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


def try_out(loaded: Loaded, workload: Workload, planned: Mapping[int, int]) -> LoadTrial:
    """Computes one prompt of random tokens, of the workload's size or the longest that the model takes.

    Args:
        planned: bytes expected on each GPU at most; see ``LoadTrial``.
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
    return LoadTrial(
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
class LoadWorkerOptions(LoadOptions):
    """Options of the worker."""

    batch: int = option(1, help="sequences at once", parse=positive_integer, group="workload")
    prompt_tokens: int = option(512, help="tokens of a prompt", parse=positive_integer, group="workload")
    new_tokens: int = option(64, help="tokens of an answer", parse=positive_integer, group="workload")
    simulate: bool = option(
        False, help="pretend the GPUs: their blocks go to the CPU's memory and are checked all the same", group="model"
    )
    no_trial: bool = option(False, help="load and check only, compute nothing", group="workload")
    json: str | None = option(None, help="write the report there as JSON", metavar="FILE", group="output")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is the last line of its log."""
    parser = Parser(prog="python -m gpuherd.models.load.worker", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder, a weight file, or a Hugging Face id")
    add_options(parser, LoadWorkerOptions)
    args, unknown = parser.parse_known_args(argv)
    parser.reject_unknown(unknown)
    words = sys.argv[1:] if argv is None else argv
    return exit_code_of(
        lambda: _load(args.model, build(LoadWorkerOptions, args), words), log=lambda text: logger.error("%s", text)
    )


def _load(model: str, options: LoadWorkerOptions, words: Sequence[str]) -> None:
    """Loads, checks, tries out, writes the report. ``words``: those of the command line."""
    from gpuherd.models.load.options import load_request
    from gpuherd.models.load.tensor_parallel import leave, load_requested

    workload = Workload(options.batch, options.prompt_tokens, options.new_tokens)
    logger.info("Model: %s", model)
    logger.info("%s", described(os.environ))
    progress.report(0, None, "plan")
    request = load_request(model, options, workload, simulate=options.simulate)
    loaded, usages = load_requested(request, ["gpuherd.models.load.worker", *words])
    # What the model itself takes at most: without the context and the reserve of other libraries.
    planned = {gpu: usage.total - usage.context - usage.reserve for gpu, usage in usages.items()}
    found: dict[str, Any] = {**loaded.report.as_json(), "trial": None}
    if not options.no_trial:
        progress.report(0, None, "compute")
        trial = try_out(loaded, workload, planned)
        logger.info("%s", trial.sentence())
        found["trial"] = trial.as_json()
    if options.parallel == "tensor":
        leave()
    if options.json is not None and os.environ.get("RANK", "0") == "0":
        write_values(Path(options.json), found)
        logger.info("Saved: %s", options.json)


if __name__ == "__main__":
    # A log that is read while the worker runs must not wait in a buffer.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.exit(main())
