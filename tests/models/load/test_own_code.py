"""Models that bring code of their own: refused by name, run only where it was allowed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.models.load.conftest import Small

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.load.pretrained import check_code, own_code

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuherd.models.load.loading import load_model  # noqa: E402

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model of an architecture of its own, and the mark that its code leaves when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, mark = tmp_path / "own", tmp_path / "mark"
    shutil.copytree(small("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own-llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE.format(mark=str(mark)))
    return folder, mark


def test_code_that_nobody_allowed_is_not_run(own: tuple[Path, Path]) -> None:
    folder, mark = own
    with pytest.raises(BadModel, match=r"needs code of its own .*modeling_own\.OwnForCausalLM.*--trust-remote-code"):
        load_model(str(folder), device_map="cpu")
    assert not mark.exists()


def test_code_that_was_allowed_is_run(own: tuple[Path, Path]) -> None:
    folder, mark = own
    loaded = load_model(str(folder), device_map="cpu", trust_remote_code=True)
    assert mark.exists() and loaded.report.class_name == "OwnForCausalLM" and loaded.report.within
    assert any("own" in note for note in loaded.report.notes)


def test_code_that_needs_a_library_that_is_not_there(own: tuple[Path, Path]) -> None:
    folder, mark = own
    code = folder / "modeling_own.py"
    code.write_text("import not_installed_anywhere\n" + code.read_text())
    with pytest.raises(MissingExtra, match="not_installed_anywhere"):
        load_model(str(folder), device_map="cpu", trust_remote_code=True)
    assert not mark.exists()


def test_code_beside_an_architecture_of_transformers_is_left_alone(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(small("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    for trusted in (False, True):
        report = load_model(str(folder), device_map="cpu", trust_remote_code=trusted).report
        assert report.class_name == "LlamaForCausalLM"
    assert not (tmp_path / "mark").exists()


def test_whose_code_it_is() -> None:
    assert own_code({"auto_map": {"AutoModel": "org/repo--modeling_x.X"}}) == "modeling_x.X"
    assert own_code({"auto_map": {"AutoConfig": "modeling_x.XConfig"}}) is None
    assert own_code({"auto_map": ["hostile"]}) is None and own_code({}) is None
    check_code("m", {"model_type": "qwen3"}, trusted=False)
    with pytest.raises(BadModel, match="needs code of its own"):
        check_code("m", {"model_type": "../../etc", "auto_map": {"AutoModel": "modeling_x.X"}}, trusted=False)
