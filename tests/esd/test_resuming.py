"""What a run that goes on elsewhere keeps of its options. (All else: tests/cli/test_esd_resume.py.)"""

from __future__ import annotations

from pathlib import Path

from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.folder import EarlierRun, resumed


def test_words_for_another_engine_are_left_behind(tmp_path: Path) -> None:
    config = ExperimentConfig(model_list="m.csv", engine="slurm", partition="gpu", host_mem=2048, setup=("date",))
    earlier = EarlierRun(tmp_path, config.to_dict(), tmp_path)
    for given, expected in (
        ({}, ("slurm", "gpu", 2048, ("date",))),
        ({"engine": "ray"}, ("ray", None, 2048, ())),
        ({"engine": "local", "gpu_list": ("0",)}, ("local", None, None, ())),
    ):
        again = ExperimentConfig(**resumed(earlier, given))
        assert (again.engine, again.partition, again.host_mem, again.setup) == expected
    here = ExperimentConfig(model_list="m.csv", gpu_list=("0", "1"))
    elsewhere = ExperimentConfig(**resumed(EarlierRun(tmp_path, here.to_dict(), tmp_path), {"engine": "slurm"}))
    assert (elsewhere.engine, elsewhere.gpu_list) == ("slurm", ())
    # A record of before there were engines is of a run on this machine, whatever the settings say now.
    old = {name: value for name, value in here.to_dict().items() if name not in ("engine", "setup", "slurm_args")}
    assert resumed(EarlierRun(tmp_path, old, tmp_path), {})["engine"] == "local"
