"""The commands that follow from a plan, as words: ask the queue, ask SLURM, plan something else. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import showing
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.request import PlanOptions, TrainingOptions
from gpuherd.models.place.result import MemoryPlan, TrainingPlan
from gpuherd.models.plan.workload import MIB

SCRIPT = "your_script.py"
# What a driver has in use on a GPU that nobody computes on.
_DRIVER_MB = 500
_SWITCHES = ("--no-checkpointing",)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A question to the planner, as the user asked it.

    Attributes:
        models: as the user named them.
        without_dtype: the same without the dtype that a name may end with (``-8bit``).
        simulate: the value of ``--simulate``.
        here: the GPUs are those of this machine.
    """

    models: tuple[str, ...]
    without_dtype: tuple[str, ...]
    options: PlanOptions
    training: TrainingOptions
    simulate: str | None = None
    here: bool = False


def command_words(request: PlanRequest, changes: Sequence[str] = ()) -> list[str]:
    """The question as a command, with other options where ``changes`` has them (``--batch 4 --checkpointing``)."""
    flags = _flags(request)
    for flag, values in _by_flag(changes):
        opposite = flag.replace("--", "--no-", 1)
        if not values and opposite in _SWITCHES:
            flags.pop(opposite, None)
            continue
        if flag == "--parallel":
            flags.pop("--gpus-per-job", None)
        flags[flag] = values
    before = ["--simulate", request.simulate] if request.simulate is not None else []
    models = request.without_dtype if "--dtype" in flags else request.models
    return ["gpuherd", *before, "plan", *models, *[word for flag, values in flags.items() for word in (flag, *values)]]


def _flags(request: PlanRequest) -> dict[str, list[str]]:
    """Flag -> its words, of all options that were given."""
    from gpuherd.options import option_fields, spellings

    flags: dict[str, list[str]] = {}
    for values, kind in ((request.options, PlanOptions), (request.training, TrainingOptions)):
        for declared, spec in option_fields(kind):
            value = getattr(values, declared.name)
            if value != declared.default:
                words = [] if value is True else [f"{value}MB" if declared.name == "cuda_context" else str(value)]
                flags[spellings(declared.name, spec)[0][0]] = words
    return flags


def _by_flag(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    at = 0
    while at < len(words):
        end = at + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        yield words[at], list(words[at + 1 : end])
        at = end


def next_steps(plan: MemoryPlan | TrainingPlan, request: PlanRequest) -> Iterator[tuple[str, list[str]]]:
    """What to do with a plan that fits: a sentence and a command each."""
    replicas = plan.replicas if isinstance(plan, MemoryPlan) else 1
    maps_blocks = isinstance(plan, MemoryPlan) and plan.parallel != "tensor"
    gpus = [load.gpu for load in plan.loads]
    memory = memory_option(plan.memory_mb, min(gpu.free for gpu in gpus))
    each = " (each replica is a job)" if replicas > 1 else ""
    # Tensor parallelism and training are a process a GPU; all else one process.
    program = _program(1 if maps_blocks else plan.gpus)
    queue = ["gpuherd", "submit", "--num-gpus", str(plan.gpus), "--mem", memory, "--", *program]
    yield f"In your own queue{each}:", queue
    if request.here:
        yield "On these GPUs now, without a queue:", [*_showing(gpus), *program]
    else:
        array = [f"--array=0-{replicas - 1}"] if replicas > 1 else []
        yield "By SLURM:", ["sbatch", f"--gres=gpu:{plan.gpus}", *array, "your_job.sh"]
    if maps_blocks:
        yield "The device map for from_pretrained, as JSON:", command_words(request, ("--device-map",))


def _program(processes: int) -> list[str]:
    return ["python", SCRIPT] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), SCRIPT]


def memory_option(memory_mb: int, free: int) -> str:
    """A size for ``--mem``: whole GB, unless a GPU that is not quite empty would have less free than that."""
    gigabytes = -(-memory_mb // 1024)
    return f"{gigabytes}GB" if (gigabytes * 1024 + _DRIVER_MB) * MIB <= free else f"{memory_mb}MB"


def _showing(gpus: Sequence[GpuSpec]) -> list[str]:
    """The words of a shell that show a command the GPUs of a plan: MIG instances by UUID."""
    names = [gpu.label if gpu.uuid is None or gpu.label.isdigit() else gpu.uuid for gpu in gpus]
    maker = Maker.AMD if any(gpu.name.startswith("AMD ") for gpu in gpus) else Maker.NVIDIA
    return [f"{name}={value}" for name, value in showing(names, maker).items()]
