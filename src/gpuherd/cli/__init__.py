"""The command line: one module per noun, and the list of all commands, which is all that ``gpuherd --help`` loads.

The module of the command ``esd plot`` defines three names, from which ``main`` builds the command: ``ESD_PLOT`` (the
description for ``--help``, with examples), ``add_esd_plot(parser)`` (its arguments) and ``run_esd_plot(args)`` (runs it
and returns the exit code). The modules import what is heavy (torch, rich, sqlite3, psutil) only while a command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A command: its module in this package, and its line in the list of commands.

    ``is_apart``: of two words, whose first also takes a command of the user's behind ``--``: a single parser could not
    tell that from the second word.
    """

    module: str
    summary: str
    is_apart: bool = False


COMMANDS: Mapping[str, Command] = {
    "esd": Command("esd", "analyse the weight spectra of a list of models"),
    "esd compare": Command("esd", "compare alpha by layer, of two models or two runs"),
    "esd export": Command("esd", "print learning-rate factors or sparsities by layer"),
    "esd import": Command("esd", "convert published results into a results folder"),
    "esd plot": Command("esd", "draw the spectra of layers, or all alphas of a model"),
    "esd views": Command("esd", "make CSV files, tables of alphas and the summary again"),
    "plan": Command("plan", "check whether a model fits on GPUs, and what would fit if it does not"),
    "merge": Command("merge", "merge a LoRA adapter into its base model"),
    "generate": Command("qa", "answer the questions of a data set with a model, on free GPUs"),
    "judge": Command("qa", "label the answers of a run as correct or not, by rule or by a model"),
    "score": Command("qa", "compute uncertainty measures for the answers of a run"),
    "evaluate": Command("qa", "compare how well uncertainty measures detect wrong answers"),
    "train": Command("posttrain", "train one model by PPO, GRPO, DPO or SFT, on one GPU or many"),
    "runs": Command("qa", "list the runs of answers, with their judgings and scores"),
    "posttrain": Command("posttrain", "train and compare policies in rounds: algorithms x data sets x models"),
    "report": Command("report", "write one HTML page of a run's results"),
    "batch": Command("batch", "run the commands of a file, each as a job"),
    "export": Command("batch", "write jobs as files for a cluster or a shell, to submit by hand"),
    "run": Command("batch", "wait for free GPUs and run a command on them"),
    "session": Command("session", "wait for free GPUs for interactive work, and give them back when unused"),
    "session list": Command("session", "list your sessions, and when they end", is_apart=True),
    "session extend": Command("session", "keep a session for some more time", is_apart=True),
    "submit": Command("queue", "put a command into your own queue"),
    "up": Command("queue", "work off your own queue in the background"),
    "down": Command("queue", "stop what gpuherd up has started"),
    "gpus": Command("gpus", "who uses which GPU, and which are free"),
    "reserve": Command("reserve", "reserve GPUs for a time to come"),
    "reserve list": Command("reserve", "list the reservations of this machine"),
    "reserve cancel": Command("reserve", "give a reservation back"),
    "usage": Command("usage", "who used the GPUs, for what, and how much"),
    "status": Command("status", "show the state of a run: what runs, waits, failed, and why"),
    "why": Command("why", "why a job waits, whose turn it is, and when it starts"),
    "logs": Command("status", "print the log of a job, or follow it"),
    "top": Command("status", "GPUs, jobs and logs on the full screen"),
    "web": Command("web", "GPUs, jobs and runs as a page in the browser"),
    "cancel": Command("queue", "end jobs for good"),
    "retry": Command("queue", "run failed or cancelled jobs again"),
    "pause": Command("queue", "pause waiting and running jobs"),
    "resume": Command("queue", "resume paused jobs"),
    "priority": Command("queue", "let jobs start earlier or later than others"),
    "drain": Command("queue", "finish running jobs, start nothing new"),
    "set": Command("queue", "change the options of a run while it is active"),
    "simulate": Command("simulate", "predict how jobs would run on given machines"),
    "record": Command("usage", "record who uses the GPUs, also without gpuherd"),
    "setup-machine": Command("usage", "one ledger for all users of the machine (root, once)"),
    "doctor": Command("doctor", "check whether this machine is ready"),
    "completion": Command("completion", "print a shell completion script"),
}
