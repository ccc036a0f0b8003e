"""A small program for Hydra, as anybody could have it: it fits a line by gradient descent and returns the loss.

It knows nothing of gpuherd.
"""

import logging
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

OmegaConf.register_new_resolver("per_step", lambda total: total / 50)
log = logging.getLogger(__name__)


@dataclass
class Fit:
    loss: float
    slope: float
    gpus: str
    began: float
    ended: float
    lock: object = None


@hydra.main(version_base="1.3", config_path="conf", config_name="config")  # type: ignore[untyped-decorator]
def fit(cfg: DictConfig) -> Fit:
    began = time.monotonic()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    log.info("seed %s on GPU %s", cfg.seed, gpus)
    if cfg.fail == cfg.seed:
        raise ValueError(f"no fit with seed {cfg.seed}")
    if cfg.die == cfg.seed:
        os.kill(os.getpid(), signal.SIGKILL)
    generator = random.Random(cfg.seed)
    points = [(x / 10, 3 * x / 10 + generator.gauss(0, 0.1)) for x in range(20)]
    slope = 0.0
    for _ in range(50):
        slope -= cfg.optimizer.lr * sum(2 * x * (slope * x - y) for x, y in points) / len(points)
    loss = sum((slope * x - y) ** 2 for x, y in points) / len(points)
    output = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    (output / "slope.txt").write_text(f"{slope:.6f}\n")
    time.sleep(50 * cfg.wait_a_step)
    while cfg.wait_for is not None and not Path(cfg.wait_for).exists():
        time.sleep(0.02)
    return Fit(loss, slope, gpus, began, time.monotonic(), threading.Lock() if cfg.locked == cfg.seed else None)


if __name__ == "__main__":
    fit()
