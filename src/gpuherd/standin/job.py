"""A fake CUDA or ROCm program: takes memory on its simulated GPUs, holds it, and ends as its arguments say.

    python -m gpuherd.standin.job --memory-mb 2000 --ramp 0.2 --hold 1 --exit 0 --events events.jsonl

Like a real one it looks at the variables that show it GPUs (``gpus.visible``), holds nothing until its ramp is over,
takes its memory in one step that fails when it does not fit, and loses it when it dies in whatever way. Only the
standard library, so that it starts fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpuherd.errors import ExitCode
from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import ORDER, PCI_ORDER, value_in
from gpuherd.standin.driver import STATE_VARIABLE
from gpuherd.standin.machine import OutOfMemory, SimulatedMachine


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. Returns its exit code."""
    args = _arguments(argv)
    machine = SimulatedMachine.open(os.environ[STATE_VARIABLE])
    gpus = _visible(machine)
    _log(args, "start", machine, gpus)
    code = _work(args, machine, gpus)
    _log(args, "end", machine, gpus, exit=code)
    return code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpuherd.standin.job", description=__doc__)
    parser.add_argument("--memory-mb", type=int, default=1000, help="memory to take on each GPU")
    parser.add_argument("--ramp", type=float, default=0.0, metavar="SECONDS", help="time before it takes the memory")
    parser.add_argument("--hold", type=float, default=0.0, metavar="SECONDS", help="time that it holds the memory")
    parser.add_argument("--exit", type=int, default=0, metavar="CODE", help="how it ends")
    parser.add_argument("--name", default="", help="what its events are called")
    parser.add_argument("--events", metavar="FILE", help="append a line of JSON at start and end")
    parser.add_argument("--result", metavar="FILE", help="a file to write when all has gone well")
    return parser.parse_args(argv)


def _visible(machine: SimulatedMachine) -> tuple[str, ...]:
    """The devices it runs on: those it is given, else the first one, as a simple CUDA program does."""
    names = value_in(os.environ, machine.maker)
    pci_order = machine.maker is Maker.AMD or os.environ.get(ORDER) == PCI_ORDER
    return machine.visible("0" if names is None else names, pci_order=pci_order)


def _work(args: argparse.Namespace, machine: SimulatedMachine, gpus: tuple[str, ...]) -> int:
    if not gpus and args.memory_mb:
        sys.stderr.write("RuntimeError: No CUDA GPUs are available\n")
        return ExitCode.FAILED
    time.sleep(args.ramp)
    try:
        held = [machine.occupy(gpu, args.memory_mb, pid=os.getpid()) for gpu in gpus]
    except OutOfMemory as problem:
        sys.stderr.write(f"torch.OutOfMemoryError: CUDA out of memory. {problem}\n")
        return ExitCode.FAILED
    time.sleep(args.hold)
    for occupation in held:
        occupation.release()
    if args.result and args.exit == 0:
        Path(args.result).write_text(f"{args.name}\n", encoding="utf-8")
    return int(args.exit)


def _log(args: argparse.Namespace, event: str, machine: SimulatedMachine, gpus: tuple[str, ...], **more: int) -> None:
    if args.events is None:
        return
    line = {
        "event": event,
        "name": args.name,
        "pid": os.getpid(),
        "time_ns": time.monotonic_ns(),
        "gpus": [machine.uuid(gpu) for gpu in gpus],
        "visible": value_in(os.environ, machine.maker),
        "attempt": os.environ.get("GPUHERD_ATTEMPT"),
        **more,
    }
    # One write to a file opened for appending: lines of many jobs don't mix.
    file = os.open(args.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


if __name__ == "__main__":
    sys.exit(main())
