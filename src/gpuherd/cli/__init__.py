"""The command line: one module a noun, and the list of all commands, which is all that ``gpuherd --help`` loads.

A command "x" is added to the parser by ``add_x`` of its module, and "x y", a command of command x, by ``add_x_y``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A command: its module in this package, and its line in the list of commands."""

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "esd": Command("esd", "analyse the weight spectra of a list of models"),
    "esd compare": Command("esd_tables", "alpha by layer of two models or two runs"),
    "esd export": Command("esd_tables", "learning-rate factors or sparsities by layer"),
    "esd import": Command("esd", "take published results into a folder of ours"),
    "esd plot": Command("esd", "draw the spectra of layers, or all alphas of a model"),
    "plan": Command("plan", "will this model fit, where, and what would if not"),
    "merge": Command("merge", "make one model of a LoRA adapter and its base"),
    "generate": Command("qa", "answer the questions of a data set with a model, on free GPUs"),
    "judge": Command("qa", "which answers of a run are right, by rule or by a model"),
    "score": Command("scores", "uncertainty measures of the answers of a run"),
    "evaluate": Command("scores", "which measure of uncertainty tells wrong answers from right ones"),
    "train": Command("posttrain", "train one model by PPO, GRPO, DPO or SFT, on one GPU or many"),
    "runs": Command("qa", "the runs of answers, and what was made of each"),
    "posttrain": Command("posttrain", "train and compare policies in rounds: algorithms x data sets x models"),
    "report": Command("report", "one HTML page of a run's results"),
    "batch": Command("batch", "run the commands of a file, each as a job"),
    "export": Command("batch", "write jobs as files for SLURM or a shell, to submit by hand"),
    "run": Command("run", "wait for free GPUs and run a command on them"),
    "submit": Command("queue", "put a command into your own queue"),
    "up": Command("queue", "work off your own queue in the background"),
    "down": Command("queue", "end what gpuherd up has begun"),
    "gpus": Command("gpus", "who uses which GPU, and which are free"),
    "status": Command("status", "how a run stands: what runs, waits, failed, and why"),
    "logs": Command("status", "what a job has written, and what it goes on to write"),
    "top": Command("status", "GPUs, jobs and logs on the full screen"),
    "cancel": Command("control", "end jobs for good"),
    "retry": Command("control", "run failed or cancelled jobs again"),
    "pause": Command("control", "let jobs stand still for a while"),
    "resume": Command("control", "let paused jobs go on"),
    "drain": Command("control", "let what runs end, start nothing new"),
    "set": Command("control", "change the options of a run that goes on"),
    "simulate": Command("simulate", "what would become of these jobs on those machines"),
    "doctor": Command("doctor", "check whether this machine is ready"),
    "completion": Command("completion", "print a shell completion script"),
}
