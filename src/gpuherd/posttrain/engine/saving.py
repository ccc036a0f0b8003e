"""A trained model as transformers (or PEFT) reads it: a folder that is complete or absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_folder, settle
from gpuherd.errors import CannotWrite
from gpuherd.posttrain.engine.trainee import Trainee


def save_model(
    trainee: Trainee,
    folder: Path,
    tokenizer: Any = None,
    *,
    part: str = "",
    beside: Mapping[str, str] | None = None,
) -> None:
    """Writes the trainee's model; all processes call it together, the main one writes. Raises CannotWrite in all.

    Args:
        folder: takes the place of what lies there when all is written and synced. Of a PEFT model it is an adapter.
        tokenizer: is saved beside it.
        part: the submodule that is the transformers model, by its name in the trainee's module (``policy`` of a module
            that has a value head beside it); the module itself by default.
        beside: texts of further files in the folder, by name.
    """
    weights = trainee.full_state()
    problem: str | None = None
    if trainee.world.is_main:
        start = f"{part}." if part else ""
        own = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
        model = trainee.plain.get_submodule(part) if part else trainee.plain
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            settle(folder)
            with atomic_folder(folder) as aside:
                model.save_pretrained(aside, state_dict=own)
                if tokenizer is not None:
                    tokenizer.save_pretrained(aside)
                for name, text in (beside or {}).items():
                    (aside / name).write_text(text, encoding="utf-8")
        except OSError as trouble:
            problem = f"can't write the model in {folder}: {trouble.strerror or trouble}"
    for each in trainee.world.gather(problem):
        if each is not None:
            raise CannotWrite(each)
