"""A worker by hand: its device, its exit codes, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.posttrain.runs.conftest import MakeSettings
from tests.posttrain.runs.test_work import begun

from gpuherd.errors import ExitCode
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.runs.worker import NoCuda, device_here, main, memory_used


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A training listens to signals; the tests go on with their own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_computes_where_it_was_put() -> None:
    assert device_here(None, simulate=False) == device_here("", simulate=False) == "cpu"
    assert device_here("3", simulate=True) == "cpu"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(NoCuda, match=r"CUDA_VISIBLE_DEVICES=3, and torch .* finds no CUDA"):
            device_here("3", simulate=False)
    assert memory_used("cpu") == {"peak_allocated": None, "peak_reserved": None, "total": None}


def test_a_job_from_its_words(
    make_settings: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = begun(make_settings(algos={"GRPO": {"online": False, "samples_per_prompt": 2}}), tmp_path / "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["--folder", str(folder.root), "--job", "GRPO_sums_tiny_r0_collect_1", "--simulate"]
    assert main(words) == ExitCode.OK
    told = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES: 0" in told and "Device: cpu" in told and '"problems": 6' in told
    usage = json.loads(folder.usage_of("GRPO_sums_tiny_r0_collect_1").read_bytes())
    assert usage == {"visible": "0", "peak_allocated": None, "peak_reserved": None, "total": None}


def test_what_no_further_try_can_help(
    make_settings: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = begun(make_settings(), tmp_path / "run")
    for words in (["--folder", str(tmp_path), "--job", "x"], ["--folder", str(folder.root), "--job", "x"]):
        assert main(words) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "is no run of gpuherd posttrain" in told and "this run has no job 'x'" in told
    # Nothing was collected: a training has nothing to read.
    assert main(["--folder", str(folder.root), "--job", "QSharp_sums_tiny_r0_train"]) == ExitCode.BAD_INPUT
    assert "can't be read" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_asked_to_stop_repeats_no_step(
    make_settings: MakeSettings, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are further apart than it has steps; it goes on behind the step in which it was asked."""
    calls, asks = tmp_path / "calls", tmp_path / "asks"
    (tmp_path / "own.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def score(completions, **columns):\n"
        f"    calls, asks = Path({str(calls)!r}), Path({str(asks)!r})\n"
        "    if len(completions) == 6:\n"  # those of a step, and not of the check before the first
        "        calls.open('a').write('.')\n"
        "        if calls.stat().st_size == 2 and asks.exists():\n"
        f"            os.kill(int(asks.read_text()), {int(number)})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    arithmetic = {"digits": 1, "train": 12, "test": 4}
    settings = make_settings(
        algos={"GRPO": {"batch_size": 3, "samples_per_prompt": 2, "lr": 1e-3, "save_every": 100}},
        datasets={"sums": {"task": "arithmetic", "settings": arithmetic, "reward": f"{tmp_path}/own.py:score"}},
    )
    whole, stopped = (begun(settings, tmp_path / name)[0] for name in ("whole", "stopped"))
    job = "GRPO_sums_tiny_r0_train"
    assert main(["--folder", str(whole.root), "--job", job, "--simulate"]) == ExitCode.OK
    in_all = calls.stat().st_size
    calls.unlink()
    asks.write_text(str(os.getpid()))
    words = ["--folder", str(stopped.root), "--job", job, "--simulate"]
    assert main(words) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: stopped after step 2 of 4")
    model = stopped.model("GRPO", "sums", "tiny", 0)
    assert len(read_curves(model)) == 2 and not stopped.policy(model).exists()
    assert main(words) == ExitCode.OK
    assert calls.stat().st_size == in_all, "a step was done twice"
    one, two = whole.model("GRPO", "sums", "tiny", 0), model
    assert [{**line, "seconds": 0} for line in read_curves(one)] == [
        {**line, "seconds": 0} for line in read_curves(two)
    ]
    weights = [(each / "model" / "model.safetensors").read_bytes() for each in (one, two)]
    assert weights[0] == weights[1]
