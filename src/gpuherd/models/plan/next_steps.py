"""The commands that follow from a plan, as words: ask the queue, ask SLURM, plan something else. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import showing
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.options import PlanOptions, TrainingOptions
from gpuherd.models.plan.result import Alternative, MemoryPlan
from gpuherd.models.plan.workload import MIB

if TYPE_CHECKING:
    from gpuherd.models.plan.training_result import TrainingPlan

SCRIPT = "your_script.py"
# What a driver has in use on a GPU that nobody computes on.
_DRIVER_MB = 500
_SWITCHES = ("--no-checkpointing",)


@dataclass(frozen=True, slots=True)
class Asked:
    """The question, as it was asked.

    Attributes:
        models: as the user named them.
        without_dtype: the same without the dtype that a name may end with (``-8bit``).
        simulate: what ``--simulate`` said.
        here: the GPUs are those of this machine.
    """

    models: tuple[str, ...]
    without_dtype: tuple[str, ...]
    options: PlanOptions
    training: TrainingOptions
    simulate: str | None = None
    here: bool = False


def asked_words(asked: Asked, changes: Sequence[str] = ()) -> list[str]:
    """The question as a command, with other options where ``changes`` has them (``--batch 4 --checkpointing``)."""
    flags = _flags(asked)
    for flag, values in _by_flag(changes):
        opposite = flag.replace("--", "--no-", 1)
        if not values and opposite in _SWITCHES:
            flags.pop(opposite, None)
            continue
        if flag == "--parallel":
            flags.pop("--gpus-per-job", None)
        flags[flag] = values
    before = ["--simulate", asked.simulate] if asked.simulate is not None else []
    models = asked.without_dtype if "--dtype" in flags else asked.models
    return ["gpuherd", *before, "plan", *models, *[word for flag, values in flags.items() for word in (flag, *values)]]


def alternative_words(asked: Asked, alternative: Alternative) -> list[str]:
    """The command that plans an alternative."""
    return asked_words(asked, alternative.words)


def _flags(asked: Asked) -> dict[str, list[str]]:
    """Flag -> its words, of all that was said."""
    from gpuherd.options import option_fields, spellings

    flags: dict[str, list[str]] = {}
    for values, kind in ((asked.options, PlanOptions), (asked.training, TrainingOptions)):
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


def steps(plan: MemoryPlan, asked: Asked) -> Iterator[tuple[str, list[str]]]:
    """What to do with a plan that fits: a sentence and a command each."""
    memory = memory_words(plan.memory_mb, min(load.card.free for load in plan.loads))
    each = " (each replica is a job)" if plan.replicas > 1 else ""
    # Tensor parallelism is a process a GPU; all else one process.
    program = _program(plan.gpus if plan.parallel == "tensor" else 1)
    yield (
        f"In your own queue{each}:",
        ["gpuherd", "submit", "--num-gpus", str(plan.gpus), "--mem", memory, "--", *program],
    )
    if asked.here:
        yield "On these GPUs now, without a queue:", [*_showing([load.card for load in plan.loads]), *program]
    else:
        array = [f"--array=0-{plan.replicas - 1}"] if plan.replicas > 1 else []
        yield "By SLURM:", ["sbatch", f"--gres=gpu:{plan.gpus}", *array, "your_job.sh"]
    if plan.parallel != "tensor":
        yield "The device map for from_pretrained, as JSON:", asked_words(asked, ("--device-map",))


def training_steps(plan: TrainingPlan, asked: Asked) -> Iterator[tuple[str, list[str]]]:
    """The same for a training: one process a GPU."""
    needed = max(-(-load.usage.total // MIB) for load in plan.loads)
    memory = memory_words(needed, min(load.card.free for load in plan.loads))
    program = _program(plan.gpus)
    queue = ["gpuherd", "submit", "--num-gpus", str(plan.gpus), "--mem", memory, "--", *program]
    yield "In your own queue:", queue
    if asked.here:
        yield "On these GPUs now, without a queue:", [*_showing([load.card for load in plan.loads]), *program]
    else:
        yield "By SLURM:", ["sbatch", f"--gres=gpu:{plan.gpus}", "your_job.sh"]


def _program(processes: int) -> list[str]:
    return ["python", SCRIPT] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), SCRIPT]


def memory_words(memory_mb: int, free: int) -> str:
    """A size for ``--mem``: whole GB, unless a GPU that is not quite empty would have less free than that."""
    gigabytes = -(-memory_mb // 1024)
    return f"{gigabytes}GB" if (gigabytes * 1024 + _DRIVER_MB) * MIB <= free else f"{memory_mb}MB"


def _showing(cards: Sequence[Card]) -> list[str]:
    """The words of a shell that show a command the GPUs of a plan: MIG instances by UUID."""
    names = [card.label if card.uuid is None or card.label.isdigit() else card.uuid for card in cards]
    maker = Maker.AMD if any(card.name.startswith("AMD ") for card in cards) else Maker.NVIDIA
    return [f"{name}={value}" for name, value in showing(names, maker).items()]
