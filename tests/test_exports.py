"""Public names of rooms, which load when they are first used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from gpuherd.errors import MissingExtra
from gpuherd.exports import on_first_use

ROOMS = ["gpuherd.gpus", "gpuherd.jobs", "gpuherd.simulate", "gpuherd.esd", "gpuherd.posttrain"]


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_gives_all_its_names_and_no_other(name: str) -> None:
    room = import_module(name)
    assert set(room.__all__) <= set(dir(room))
    for each in room.__all__:
        assert getattr(room, each) is vars(room)[each]
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = room.nothing


@pytest.mark.parametrize("name", ROOMS)
def test_no_name_is_hidden_by_a_module_of_the_room(name: str) -> None:
    room = import_module(name)
    modules = {each.stem for folder in room.__path__ for each in Path(folder).iterdir()}
    assert not modules & set(room.__all__)


@pytest.mark.parametrize("name", ROOMS)
def test_importing_a_room_loads_none_of_its_modules(name: str) -> None:
    code = f"import sys, {name}; print([each for each in sys.modules if each.startswith(('{name}.', 'torch'))])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attic").mkdir()
    (tmp_path / "attic" / "__init__.py").touch()
    (tmp_path / "attic" / "chest.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("attic")
    load, _ = on_first_use("attic", {"Chest": "chest"}, extra="keys", brings=("not_installed_here",))
    with pytest.raises(MissingExtra, match=r"pip install 'gpuherd\[keys\]' brings what attic needs"):
        load("Chest")
    load, _ = on_first_use("attic", {"Chest": "chest"})
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        load("Chest")
