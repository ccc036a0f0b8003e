"""The program that trains: words in, an exit code out. Joins the others where torchrun has started it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuherd.engines.process_tree import ATTEMPT_VARIABLE, identify
from gpuherd.errors import ExitCode, GpuherdError, UsageError, printable
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.options import Parser
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.learning.foresight import check_data
from gpuherd.posttrain.learning.preparing import look_over, prepare
from gpuherd.posttrain.learning.reading import read_config
from gpuherd.posttrain.learning.translating import cut, model_of
from gpuherd.posttrain.rollout.lengths import UNKNOWN, Lengths, lengths_of
from gpuherd.runs.console import configure_console, logged_to
from gpuherd.runs.worker import exit_code_of

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.world import World

MODULE = "gpuherd.posttrain.learning"
STARTER = "GPUHERD_TRAIN_STARTER"  # pid of the gpuherd train that waits for us
DESCRIPTION = """\
One process of a training; gpuherd train starts it. By hand, over four GPUs:
  torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config config.yaml --output outputs/first
"""

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains. Returns the exit code; what went wrong is on standard error."""
    parser = Parser(prog=f"python -m {MODULE}", description=DESCRIPTION)
    parser.intermixed = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to set in the configuration")
    parser.add_argument("--config", metavar="FILE", help="the configuration (default: that of the output folder)")
    parser.add_argument("--output", metavar="DIR", help="the output folder (default: output_dir)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to train (default: on GPUs, where there are some)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the training that lies there")
    args, unknown = parser.parse_known_args(argv)
    parser.reject_unknown(unknown)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asked = Asked()

    def start() -> None:
        configure_console()
        if args.config is None and args.output is None:
            raise UsageError("--config FILE is missing (or --output DIR --resume, to go on)")
        # On another machine than the first the folder may not have been begun yet: the main process tells all.
        config = None
        if args.config is not None or args.device is None:
            config = read_config(args.config or TrainDirectory(args.output).config, args.overrides)
        _run(config, args, asked)

    return exit_code_of(start, interrupted=lambda: asked.code)


class Asked:
    """Whether somebody wants the training to end: by a signal, by a file in its folder, or by having gone away.

    Attributes:
        code: what it exits with then.
        alone: nobody waits for us: we were started by hand, or by the user's torchrun.
    """

    def __init__(self) -> None:
        self.code = ExitCode.INTERRUPTED
        pid = os.environ.get(STARTER, "")
        self.alone = not pid.isdecimal()
        self._starter = None if self.alone else identify(int(pid))
        self._signalled = False
        self._folder: TrainDirectory | None = None

    def listen(self, folder: TrainDirectory) -> None:
        """From now on. A second signal ends the process at once."""
        self._folder = folder
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def stopping(self) -> bool:
        """Asked after each step."""
        if self._folder is not None and self._folder.stop.exists():
            return True
        gone = self._starter is None or not self._starter.is_alive()
        return self._signalled or (gone and not self.alone)

    def _take(self, number: int, _frame: object) -> None:
        # Asked before, perhaps by the file: of two requests to gpuherd train only the second one comes as a signal. In
        # a job one request comes several times, from whoever leads it, from torchrun and from SLURM; and who asked ends
        # us when our time is over.
        again = self._signalled or (self._folder is not None and self._folder.stop.exists())
        again = again and ATTEMPT_VARIABLE not in os.environ
        self._signalled = True
        self.code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        if again:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _run(config: TrainConfig | None, args: argparse.Namespace, asked: Asked) -> None:
    """Joins the others, and trains. ``config``: where it is known before; the main process's counts for all."""
    from gpuherd.posttrain.engine.world import World

    device = args.device if args.device is not None or config is None or config.device == "auto" else config.device
    with ExitStack() as stack:
        world = stack.enter_context(World.from_environment(device))
        begun = world.broadcast(_begun(config, args, stack, asked) if world.is_main else None)
        if isinstance(begun, GpuherdError):
            if not world.is_main:  # said once is enough
                raise SystemExit(begun.exit_code)
            raise begun
        assert begun is not None  # noqa: S101 - the main process has said it
        config, folder, lengths = begun
        if folder.done.exists():
            if world.is_main:
                print(f"The training in {printable(str(folder.root))} has ended; nothing is left to do")
            return
        asked.listen(folder)
        if world.is_main:
            stack.enter_context(logged_to(folder.run_log, shown=True))
            if asked.alone and (warning := cut(config)) is not None:  # gpuherd train has told its own
                logger.warning("%s", warning)
            if asked.alone and world.device != "cpu":
                from gpuherd.posttrain.learning.memory import foretell

                here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                foretell(config, here, world.size, lengths)  # gpuherd train has done so
        elif not os.environ.get("LOG_LEVEL"):
            _quieter()
        _train(config, folder, world, asked)


def _begun(
    config: TrainConfig | None, args: argparse.Namespace, stack: ExitStack, asked: Asked
) -> tuple[TrainConfig, TrainDirectory, Lengths] | GpuherdError:
    """The configuration, the folder locked and prepared, and how long what is learnt from is, where nobody has looked
    before; or what is wrong, for all to say."""
    lengths = UNKNOWN
    try:
        if config is None:
            config = read_config(TrainDirectory(args.output).config, args.overrides)
        folder = TrainDirectory.of(config, args.output)
        look_over(folder, config, resume=args.resume)
        if asked.alone and not folder.done.exists():
            # Else whoever started us has looked.
            lengths = lengths_of(check_data(config), model_of(config), chat=config.model.use_chat_template)
        folder.create()
        lock = DispatcherLock(folder.lock)
        stack.callback(lock.close)
        prepare(folder, config, resume=args.resume)
        if asked.alone:  # else it may be meant for us
            folder.stop.unlink(missing_ok=True)
    except GpuherdError as problem:
        return problem
    return config, folder, lengths


def _quieter() -> None:
    """What all processes warn of, the main one says; what concerns this one alone, its trainee does."""
    logging.getLogger("gpuherd").setLevel(logging.ERROR)
    logging.getLogger("gpuherd.posttrain.engine").setLevel(logging.WARNING)


def _train(config: TrainConfig, folder: TrainDirectory, world: World, asked: Asked) -> None:
    from transformers.utils import logging as of_transformers

    from gpuherd.posttrain.learning.work import train

    of_transformers.disable_progress_bar()
    if world.device == "cpu" and config.training.use_fp16:
        raise UsageError("training.use_fp16 on a CPU: float16 is slow and overflows there; use_bf16, or neither")
    logger.info("process %d of %d on %s", world.rank, world.size, world.device)
    try:
        summary = train(config, folder, world, asked.stopping)
    except GpuherdError as problem:
        logger.info("error: %s", problem)  # for run.log; who catches it says it to people
        raise
    if world.is_main:
        print(f"Trained: {summary['steps']} steps in {summary['seconds']:.0f} s; {printable(str(folder.model))}")
