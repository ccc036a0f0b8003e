"""Rounds of three learning rates, each around the best of the last: a sweeper that needs what jobs return, as those of
Optuna and Ax do.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@dataclass
class ClimbingConf:
    _target_: str = "hydra_plugins.climbing_sweeper.climbing_sweeper.ClimbingSweeper"
    rounds: int = 3


ConfigStore.instance().store(group="hydra/sweeper", name="climbing", node=ClimbingConf, provider="tests")


class ClimbingSweeper(Sweeper):  # type: ignore[misc]  # Hydra comes without types
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        tried: list[tuple[float, float, str]] = []
        middle = 0.001
        for _ in range(self.rounds):
            rates = [middle / 3, middle, middle * 3]
            overrides = [[*arguments, f"optimizer.lr={rate!r}"] for rate in rates]
            returns = self.launcher.launch(overrides, initial_job_idx=len(tried))
            for rate, returned in zip(rates, returns, strict=True):
                tried.append((rate, returned.return_value.loss, returned.return_value.gpus))
            middle = min(tried, key=lambda each: each[1])[0]
        found = Path(self.config.hydra.sweep.dir) / "climbed.json"
        found.write_text(json.dumps({"best": middle, "tried": tried}))
        return middle
