"""The names of all commands, each with its line in the list: all that ``gpuherd --help`` needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping

# Of two words where a command has commands of its own: then in the module ``<first>_<second>``.
SUMMARIES: Mapping[str, str] = {
    "esd": "analyse the weight spectra of a list of models",
    "esd compare": "alpha by layer of two models or two runs",
    "esd export": "learning-rate factors or sparsities by layer",
    "esd import": "take published results into a folder of ours",
    "esd plot": "draw the spectra of layers, or all alphas of a model",
    "plan": "will this model fit, where, and what would if not",
    "merge": "make one model of a LoRA adapter and its base",
    "generate": "answer the questions of a data set with a model, on free GPUs",
    "judge": "which answers of a run are right, by rule or by a model",
    "score": "uncertainty measures of the answers of a run",
    "evaluate": "which measure of uncertainty tells wrong answers from right ones",
    "train": "train one model by PPO, GRPO, DPO or SFT, on one GPU or many",
    "runs": "the runs of answers, and what was made of each",
    "posttrain": "train and compare policies in rounds: algorithms x data sets x models",
    "report": "one HTML page of a run's results",
    "batch": "run the commands of a file, each as a job",
    "export": "write jobs as files for SLURM or a shell, to submit by hand",
    "run": "wait for free GPUs and run a command on them",
    "submit": "put a command into your own queue",
    "up": "work off your own queue in the background",
    "down": "end what gpuherd up has begun",
    "gpus": "who uses which GPU, and which are free",
    "status": "how a run stands: what runs, waits, failed, and why",
    "logs": "what a job has written, and what it goes on to write",
    "top": "GPUs, jobs and logs on the full screen",
    "cancel": "end jobs for good",
    "retry": "run failed or cancelled jobs again",
    "pause": "let jobs stand still for a while",
    "resume": "let paused jobs go on",
    "drain": "let what runs end, start nothing new",
    "set": "change the options of a run that goes on",
    "simulate": "what would become of these jobs on those machines",
    "doctor": "check whether this machine is ready",
    "completion": "print a shell completion script",
}
