"""What the commands that start jobs share: settings and the engine, and memory plans for jobs that name a model.

GPUs are queried when the first job that names a model is planned, not before: the query takes a moment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError, printable
from gpuherd.jobs.job import ModelUse, Need, Planner
from gpuherd.options import option_fields

if TYPE_CHECKING:
    from gpuherd.engines.options import EngineOptions
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.options import DispatchOptions
    from gpuherd.jobs.settings import Settings
    from gpuherd.models.plan.card import Card

_LONGEST_STEM = 60
# A list may name thousands of models; the plan of each is in the table of a dry run.
_MOST_TOLD = 20
# The flags of gpuherd plan as keys of a job file.
JOB_FILE: Mapping[str, str | None] = {
    "--dtype": "dtype={}",
    "--batch": "batch={}",
    "--prompt-tokens": "prompt-tokens={}",
    "--parallel": "parallel={}",
    "--num-gpus": "gpus={}",
}


@dataclass(frozen=True, slots=True)
class Having:
    """GPUs that jobs may get, as free as when nobody uses them, and how many a run has at once (None: all)."""

    cards: Sequence[Card]
    most: int | None = None


def on_stderr(sentence: str) -> None:
    """Tells people, and leaves standard output to what the command is for."""
    print(f"gpuherd: {sentence}", file=sys.stderr, flush=True)


def planner(
    look: Callable[[], Having],
    tell: Callable[[str], None] = on_stderr,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> Planner:
    """Says what jobs need that name a model.

    Args:
        look: gives the GPUs; called once, when the first model is planned.
        tell: is given the sentences of the first plans, safe to print.
        spelling: as in ``demand_of``: ``JOB_FILE`` where jobs come from a file.
    """
    seen: list[Having] = []
    told = 0

    def plan(use: ModelUse) -> Need:
        nonlocal told
        from gpuherd.models.plan.asking import demand_for

        if not seen:
            seen.append(look())
        words = asdict(use)
        said_mb = words.pop("memory_mb")
        demand = demand_for(**words, cards=seen[0].cards, most=seen[0].most, spelling=spelling)
        sentence = (
            demand.sentence if said_mb is None else f"{demand.sentence}; {said_mb} MB in place of that, as was said"
        )
        told += 1
        if told <= _MOST_TOLD:
            tell(printable(sentence))
        elif told == _MOST_TOLD + 1:
            tell("more models are planned; --dry-run shows what each job asks for")
        return Need(demand.gpus, demand.memory_mb, family_of(use, demand.gpus, demand.memory_mb), sentence)

    return plan


def family_of(use: ModelUse, gpus: int, memory_mb: int) -> str:
    """One name for all jobs that use a model in the same way on as many GPUs: they need the same memory on each. By
    its plan too, since the same words may name another model in another folder."""
    key = repr((sorted(asdict(use).items(), key=str), gpus, memory_mb))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", use.model).strip("-")[-_LONGEST_STEM:].lstrip("-") or "model"
    return f"{stem}.{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def of_gpus(gpus: Sequence[Gpu], most: int | None = None) -> Having:
    """These GPUs, ``most`` of them at once."""
    from gpuherd.models.plan.demand import idle_cards

    return Having(idle_cards(gpus), most)


def of_a_run(options: DispatchOptions, most: int | None) -> Having:
    """The GPUs that a run with these options may use, ``most`` of them at once; those of a node of its cluster."""
    if options.engine != LOCAL:
        return of_a_cluster(options)
    from gpuherd.jobs.gpu.watch import watch_for_plan
    from gpuherd.jobs.settings import load

    return of_gpus(watch_for_plan(options, load()).gpus, most)


def of_a_cluster(options: EngineOptions) -> Having:
    """The GPUs of one of its nodes. No driver is asked on this machine."""
    from gpuherd.models.plan.cluster import node_cards

    return Having(node_cards(options))


def of_the_queue() -> Having:
    """The GPUs of the dispatcher that works the user's own queue off; those of this machine where nobody does."""
    from gpuherd.batch.user_queue import folder
    from gpuherd.gpus.query import machine
    from gpuherd.jobs.feasibility import dispatchers_machine
    from gpuherd.jobs.run_dir import RunDirectory

    here = machine().gpus
    told = dispatchers_machine(RunDirectory(folder()))
    if told is None:
        return of_gpus(here)
    now = {gpu.uuid: gpu for gpu in here}
    return of_gpus([now.get(gpu.uuid, gpu) for gpu in told.gpus], told.max_gpus)


def fill_from_yaml(args: argparse.Namespace, config_type: type, told: Any) -> None:
    """Puts what the key says where the command line has said nothing; nothing of another engine than was said there.

    Raises UsageError, with the key, for what it can't say.
    """
    from gpuherd.engines.options import read_block

    fill_from_block(args, read_block(told, {field.name for field, _ in option_fields(config_type)}))


def fill_from_block(args: argparse.Namespace, block: Mapping[str, Any]) -> None:
    """The same with what was read already. Simulated GPUs are this machine's, whatever a file says."""
    here = None if args.simulate is None else LOCAL
    if getattr(args, "engine", here) not in (None, block.get("engine")):
        return
    for name, value in block.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def key_of(file: str | None, words: Mapping[str, Any]) -> Any:
    """What a YAML file says under ``engine``, and what is said over it by full keys (``engine``, ``engine.partition``);
    None where nothing is. Raises UsageError for a file that can't be read, and for a key of what is no mapping.
    """
    from gpuherd.posttrain.config.yaml_strict import read_yaml

    told: Any = None if file is None else read_yaml(file).get("engine")
    told = words.get("engine", told)
    inner = {key.partition(".")[2]: value for key, value in words.items() if key.startswith("engine.")}
    if not inner:
        return told
    block = {} if told is None else dict(told) if isinstance(told, Mapping) else {"name": told}
    return block | inner


def about_engines(words: Sequence[str]) -> list[str]:
    """Those of the words ``key=value`` that speak of the engine."""
    keys = [(word, word.lstrip("+").partition("=")[0]) for word in words]
    return [word.lstrip("+") for word, key in keys if key == "engine" or key.startswith("engine.")]


def keep_simulation_here(args: argparse.Namespace) -> None:
    """With ``--simulate`` jobs run here, whatever the settings say. Raises UsageError where a cluster was named."""
    if args.simulate is None:
        return
    if getattr(args, "engine", None) not in (None, LOCAL):
        raise UsageError(
            f"--simulate pretends GPUs of this machine, and --engine {args.engine} would hand the jobs to a cluster, "
            "which knows nothing of them; leave one of both out"
        )
    args.engine = LOCAL


def stay_inside(args: argparse.Namespace, settings: Settings) -> None:
    """Where the options want the command to run inside of the engine's job that it is typed in (``--in-allocation``),
    the engine becomes this machine's. Elsewhere than on that job's node this process becomes the same command there.

    Raises as ``EngineSpec.take_over``.
    """
    from gpuherd.engines.base import Replacement
    from gpuherd.engines.options import EngineOptions, engine_values
    from gpuherd.engines.registry import foreign

    name = getattr(args, "engine", settings.engine)
    if name == LOCAL:
        return
    given = engine_values(args) | {"engine": name}
    defaults = {
        key: value
        for key, value in engine_values(SimpleNamespace(**settings.defaults)).items()
        if key not in foreign(name)
    }
    found = EngineOptions(**given).spec.take_over(
        EngineOptions(**given), EngineOptions(**(defaults | given)), [sys.executable, "-m", "gpuherd", *sys.argv[1:]]
    )
    if found is None:
        return
    if isinstance(found, Replacement):
        from gpuherd.batch.run_remote import become

        become(found, inherited=(0, 1, 2))
    most = [getattr(args, "max_concurrent", settings.defaults.get("max_concurrent")), found.at_once]
    at_once = [each for each in most if each is not None]
    if at_once:
        args.max_concurrent = min(at_once)
    for option in foreign(LOCAL) & vars(args).keys():
        delattr(args, option)
    args.engine = LOCAL
    from gpuherd.gpus.visible import hide_unless_named

    # Where the engine has given this shell no GPU, those that the machine has are others'.
    hide_unless_named(os.environ)
    sys.stderr.write(f"gpuherd: the jobs run in {found.title}, on {found.node}\n")


def load_for(args: argparse.Namespace, config_type: type, *, stays: bool = True) -> Settings:
    """The user's and the machine's settings; what they say of this dataclass's options goes into ``args`` where the
    command line has said nothing.

    Args:
        stays: with ``--in-allocation`` the command starts jobs on this machine (``stay_inside``).

    Raises UsageError for a file that is wrong, and for a --node-gpus that makes no sense; and as
    ``stay_inside``.
    """
    from gpuherd.jobs.settings import load

    settings = load()
    keep_simulation_here(args)
    if stays:
        stay_inside(args, settings)
    settings.fill(args, config_type)
    check_node_gpus(getattr(args, "node_gpus", None))
    return settings


def check_node_gpus(words: str | None) -> None:
    """Raises UsageError for words of ``--node-gpus`` that make no sense, whether a model will be planned or not."""
    if words is not None:
        from gpuherd.models.plan.cluster import said_cards

        said_cards(words)
