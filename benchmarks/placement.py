"""Where models go: our plan beside transformers' ``device_map="auto"`` and accelerate's balanced memory.

Model x GPU cases of which most are the reference's (its section 4.3), each with the work that is to be done: 8
sequences of 512 + 64 tokens. All maps are judged by one yardstick, our own bytes of what lies on each GPU (weights,
quantisation, KV cache, the prompt's workspace), because the libraries count weights only. Budgets are what may be used
of a GPU.

For each case: GPUs of a replica and replicas, GiB and layers on each GPU, how full the fullest is, and a verdict.
``ours`` takes the fewest GPUs; ``ours_over_all`` splits over all of them, to be compared with maps that do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._device_maps import DeviceMap, by_accelerate, by_transformers, meta_model
from gpuherd.cli import COMMANDS
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.known_models import known_model
from gpuherd.models.describe.process import described
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import GIB, Reserve, Workload
from gpuherd.models.memory.usage import CostTable
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec, parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.request import ParallelOption
from gpuherd.models.place.result import MemoryPlan

WORKLOAD = Workload(batch=8, prompt_tokens=512, new_tokens=64)


@dataclass(frozen=True)
class Case:
    """A model in a precision on GPUs; ``quick`` ones are run with --quick too, ``untied`` ones have a head of their
    own."""

    model: str
    precision: str
    gpus: str
    quick: bool = False
    untied: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.model}{' untied' if self.untied else ''} {self.precision} on {self.gpus}"

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's published config."""
        known = known_model(self.model)
        if known is None:
            raise SystemExit(f"{self.model} is no known model")
        return {**known.config, "tie_word_embeddings": False} if self.untied else known.config


CASES = (
    Case("llama-3.1-70b", "fp16", "4x39GB"),
    Case("llama-3.1-70b", "fp16", "4x34GB"),
    Case("llama-3.1-70b", "fp16", "4x30GB"),
    Case("llama-3.1-70b", "int8", "2x39GB"),
    Case("llama-3.1-70b", "int8", "2x40GB"),
    Case("llama-3.1-70b", "int8", "4x39GB"),
    Case("llama-3.1-70b", "nf4", "4x23.5GB"),
    Case("llama-3.1-8b", "fp16", "4x39GB"),
    Case("llama-3.1-8b", "nf4", "8x23.5GB"),
    Case("llama-3.2-1b", "fp16", "4x39GB", quick=True),
    Case("llama-3.2-1b", "nf4", "2x6GB", quick=True),
    Case("llama-2-13b", "fp16", "1x23.5GB"),
    Case("llama-2-13b", "fp16", "2x23.5GB"),
    Case("llama-2-13b", "fp16", "2x10GB+1x23.5GB"),
    Case("gemma-3-27b", "nf4", "8x22GB"),
    Case("gemma-3-27b", "nf4", "8x22GB", untied=True),
    Case("mixtral-8x7b", "fp16", "4x39GB"),
    Case("qwen2.5-32b", "bf16", "2x39GB"),
    Case("qwen2.5-72b", "nf4-dq", "2x23.5GB"),
    Case("llama-3.1-405b", "int8", "8x79GB"),
)


def run(*, quick: bool) -> dict[str, Any]:
    """The table, the time of a plan, and the time of a command from cold."""
    cases = [case for case in CASES if case.quick or not quick]
    rows = [_row(case) for case in cases]
    return {
        "workload": "8 sequences of 512 + 64 tokens",
        "cases": rows,
        "worse_than_a_library": [row["case"] for row in rows if row["worse"]],
        "plan_ms": _plan_times(3 if quick else 50),
        "cold_ms": _cold(3 if quick else 20),
    }


# ---- one case --------------------------------------------------------------------------------------------------------


def _row(case: Case) -> dict[str, Any]:
    architecture, cards = described(case.config, case.model), parse_gpus(case.gpus)
    judge = Judge(architecture, Precision(case.precision), cards)
    maps = _libraries(case, [card.free for card in cards])
    ours, over_all = judge.plan("auto"), judge.plan("layers")
    told = {name: judge.map(found) for name, found in maps.items()}
    row = {
        "case": case.name,
        "ours": ours,
        "ours_over_all": over_all,
        **told,
    }
    return {**row, "worse": worse(ours, over_all, told)}


def worse(ours: Mapping[str, Any], over_all: Mapping[str, Any], told: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Libraries that place what we refuse, or fill their fullest GPU less than our split over all GPUs."""
    found = []
    for name, theirs in told.items():
        if (theirs["verdict"] == "fits" and not ours["verdict"].startswith("fits")) or (
            "fullest" in theirs and theirs["fullest"] < over_all["fullest"]
        ):
            found.append(name)
    return found


def _libraries(case: Case, budgets: Sequence[int]) -> dict[str, DeviceMap | str]:
    """The maps of the libraries, or what they say where they refuse."""
    model, quantizer = meta_model(case.config, case.precision)
    found = {"transformers_auto": _or_refusal(lambda: by_transformers(model, quantizer, budgets))}
    if quantizer is None:
        found["accelerate_balanced"] = _or_refusal(lambda: by_accelerate(model, budgets))
    return found


def _or_refusal(make: Callable[[], DeviceMap]) -> DeviceMap | str:
    try:
        return make()
    except ValueError as refusal:
        return f"ValueError: {str(refusal)[:70]}"


class Judge:
    """Tells what any map means for these cards by our bytes."""

    def __init__(
        self,
        architecture: Architecture,
        precision: Precision,
        cards: Sequence[GpuSpec],
        workload: Workload = WORKLOAD,
        reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    ) -> None:
        self.architecture, self.precision, self.cards = architecture, precision, cards
        self._workload, self._reserve = workload, reserve
        self._costs = CostTable(architecture, precision, workload, reserve)

    def plan(self, parallel: ParallelOption) -> dict[str, Any]:
        """Our own plan."""
        told = make_plan(
            self.architecture, self.cards, self.precision, self._workload, self._reserve, parallel=parallel
        )
        if isinstance(told, MemoryPlan):
            verdict = f"fits: {told.gpus} GPU x {told.replicas} replicas, at most {told.largest_batch} sequences"
        else:
            verdict = f"refused: {told.reason}"
        # The plan's blocks may stand in another order than the model's.
        names = [block.name for block in self.architecture.blocks]
        places = [block.name for block in told.architecture.blocks]
        on = {
            load.gpu.label: [names.index(name) for name in places[load.first : load.after_last]] for load in told.loads
        }
        return self._figures([on.get(card.label, []) for card in self.cards], verdict)

    def map(self, found: DeviceMap | str) -> dict[str, Any]:
        """A library's map."""
        if isinstance(found, str):
            return {"verdict": found}
        places = [_place(block.name, found) for block in self.architecture.blocks]
        away = [place for place in places if not isinstance(place, int)]
        if away:
            return {"verdict": f"offloads {len(away)} modules to {' and '.join(sorted(set(map(str, away))))}"}
        blocks = [[number for number, place in enumerate(places) if place == gpu] for gpu in range(len(self.cards))]
        return self._figures(blocks, None)

    def _figures(self, blocks: Sequence[Sequence[int]], verdict: str | None) -> dict[str, Any]:
        needs = [self.need(some) for some in blocks]
        layers = [sum(self.architecture.blocks[number].kind == "layer" for number in some) for some in blocks]
        # What a map may fill: all but the context and the reserve of our plans.
        rooms = [card.free - self._reserve.context - self._reserve.on(card.total) for card in self.cards]
        fullest = max(need / room for need, room in zip(needs, rooms, strict=True))
        return {
            "gib": [round(need / GIB, 1) for need in needs],
            "layers": layers,
            "fullest": round(fullest, 4),
            "verdict": verdict or ("fits" if fullest <= 1 else f"too full by {100 * (fullest - 1):.1f} %"),
        }

    def need(self, blocks: Sequence[int]) -> int:
        """Bytes of these blocks together on one GPU, wherever they stand; storages that they share counted once."""
        if not blocks:
            return 0
        costs, each = self._costs, [(number, number + 1) for number in blocks]
        caches = [costs.cache(*run) for run in each]
        moments = [costs.workspace(*run) for run in each]
        after_prompt = sum(cache.after_prompt for cache in caches) + max(moment[0] for moment in moments)
        at_end = sum(cache.at_end for cache in caches) + max(moment[1] for moment in moments)
        return sum(sum(costs.weights(*run)) for run in each) - self._shared(blocks) + max(after_prompt, at_end)

    def _shared(self, blocks: Sequence[int]) -> int:
        """What was counted more than once: ties between these blocks."""
        here = {tensor.name: number for number in blocks for tensor in self.architecture.blocks[number].tensors}
        number_bytes = self.precision.number_bytes
        return sum(
            tensor.numel * number_bytes
            for number in blocks
            for tensor in self.architecture.blocks[number].tensors
            if tensor.tied_to is not None and here.get(tensor.tied_to, number) != number
        )


def _place(block: str, found: DeviceMap) -> int | str:
    """Where a map puts a block: the entry of its own path, or of the longest path above it; a block that is split over
    several devices lies where the first of its parts does."""
    above = [path for path in found if path in ("", block) or block.startswith(f"{path}.")]
    if above:
        return found[max(above, key=len)]
    return next(place for path, place in found.items() if path.startswith(f"{block}."))


# ---- time ------------------------------------------------------------------------------------------------------------


def _plan_times(repeats: int) -> dict[str, Any]:
    """CPU-milliseconds of a plan once the architecture is known: median and most over the repeats."""
    told = {}
    for model, precision, gpus in (
        ("llama-3.2-1b", "bf16", "4xA100-40"),
        ("llama-3.1-70b", "bf16", "4xA100-40"),
        ("llama-3.1-70b", "nf4-dq", "4xRTX4090"),
        ("llama-3.1-405b", "int8", "8xH100"),
    ):
        architecture, cards = read_architecture(model), parse_gpus(gpus)
        times = []
        for _ in range(repeats):
            started = time.process_time()
            make_plan(architecture, cards, Precision(precision), WORKLOAD)
            times.append((time.process_time() - started) * 1000)
        told[f"{model} {precision} on {gpus}"] = {
            "median": round(statistics.median(times), 2),
            "most": round(max(times), 2),
        }
    return told


_FROM_PYTHON = """
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.memory.weights import Precision
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import Workload
make_plan(read_architecture("llama-3.1-70b"), parse_gpus("4xA100-40"), Precision("bf16"), Workload(8))
"""


def _cold(repeats: int) -> dict[str, Any]:
    """Wall milliseconds from process start to exit."""
    commands = {"python": [sys.executable, "-c", _FROM_PYTHON]}
    if "plan" in COMMANDS:
        words = ["plan", "llama-3.1-70b", "--dtype", "bf16", "--gpus", "4xA100-40"]
        commands["gpuherd plan"] = [sys.executable, "-m", "gpuherd", *words]
    told = {}
    for name, command in commands.items():
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append((time.perf_counter() - started) * 1000)
        # The first run fills the disk cache and the folder of byte code.
        told[name] = {"median": round(statistics.median(times[1:])), "least": round(min(times[1:]))}
    return told
