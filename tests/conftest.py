"""Fixtures for all tests: no environment of the user's, simulated GPUs on demand, and small models on disk."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests import browsing, warming
from tests.forking import Forking

from gpuherd import cli
from gpuherd.gpus.visible import VARIABLES
from gpuherd.standin import driver
from gpuherd.standin.machine import SimulatedMachine

MakeModel = Callable[..., Path]

# Where users set their own number of threads, jobs are not given theirs: neither here nor on a test's nodes.
os.environ.pop("OMP_NUM_THREADS", None)

# Hundreds of tests start Python: without bytecode each start compiles our modules again, a fifth of its time. And
# pytest rewrites all assertions again, half the time of collecting.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# More processes than cores compute at a time: idle threads sleep at once, here and in what is started.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# No test hangs on the machine's speed.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A suite that a shell started in the background ignores Ctrl-C, and so would every command that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One that nohup started ignores a hang-up, and so would every dispatcher that a test tells to read its settings again.
# A handler is not inherited, and lets the suite itself live on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """What a worker of pytest-xdist does before it collects."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    warming.load_single_threaded()
    if config.getoption("assertmode") == "rewrite":
        warming.compile_share(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.fixture(scope="session", autouse=True)
def _driver_library() -> None:
    """The stand-in comes first, so that a test process never loads a real driver: there are no GPUs until a test
    asks for some, on any machine.
    """
    driver.load()


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the user's; and a machine that a command of a test has simulated is gone after that test."""
    for name in list(os.environ):
        if name.startswith(("GPUHERD_", "CUDA_")) or name in VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("GPUHERD_MACHINE_DIR", str(tmp_path / "machine"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    if driver.STATE_VARIABLE in os.environ:
        driver.forget()


@pytest.fixture(scope="session")
def forking_gpuherd() -> Iterator[Forking]:
    """A process that has imported all commands, and forks to run one: the tenth of the time of a new process."""
    commands = [f"gpuherd.cli.{path.stem}" for path in Path(str(cli.__file__)).parent.glob("[!_]*.py")]
    # The loader looks at its path when a process starts: forks must find the stand-in driver there already.
    libraries = str(driver.library_folder())
    with Forking(*commands, OPENBLAS_NUM_THREADS="1", LD_LIBRARY_PATH=libraries) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[browsing.Window]:
    """The window in which ``browsing.Opened`` opens pages. A module's: its driver leaves no other event loop room."""
    yield from browsing.one_window()


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Callable[..., SimulatedMachine]]:
    """``standin("4x40GB")`` makes a simulated machine that this process and its children see until the test ends."""
    machines: list[SimulatedMachine] = []

    def make(spec: str = "4x40GB", *, attribute: bool = False) -> SimulatedMachine:
        machine = SimulatedMachine.create(tmp_path / f"machine{len(machines)}", spec, attribute=attribute)
        machines.append(machine)
        machine.activate()
        return machine

    yield make
    for machine in machines:
        machine.deactivate()


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """``make_model("a", seed=1)`` writes a model folder with a few small matrices and returns its path."""

    def make(name: str, *, seed: int = 0, layers: int = 2, width: int = 32, fill: float | None = None) -> Path:
        import numpy as np
        from safetensors.numpy import save_file

        rng = np.random.default_rng(seed)
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        tensors: dict[str, Any] = {"model.embed_tokens.weight": rng.standard_normal((50, width)).astype(np.float32)}
        for layer in range(layers):
            for part, shape in (("self_attn.q_proj", (width, width)), ("mlp.up_proj", (2 * width, width))):
                weight = rng.standard_t(3, shape).astype(np.float32)
                tensors[f"model.layers.{layer}.{part}.weight"] = weight if fill is None else np.full_like(weight, fill)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": width}))
        return folder

    return make


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeModel:
    """``make_adapter("lora", base=path)`` writes a LoRA adapter for a model of ``make_model``."""

    def make(name: str, *, base: str | Path | None, seed: int = 0, layers: int = 2, width: int = 32) -> Path:
        import numpy as np
        from safetensors.numpy import save_file

        rng = np.random.default_rng(seed)
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        tensors = {}
        for layer in range(layers):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((4, width)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((width, 4)).astype(np.float32)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
        if base is not None:
            config["base_model_name_or_path"] = str(base)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all nodes of a test cluster see."""
    with tempfile.TemporaryDirectory(prefix="shows-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)
