"""A program ``ssh`` that stands in for other machines: the edge of this one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HOSTILE = "<b onmouseover=alert(1)>\x1b[31m'\"\u202e</b>"
FREE = {"label": "0", "name": "NVIDIA A100", "used_mb": 3, "total_mb": 40960, "utilisation_percent": 0, "free": True}
BUSY = {
    "label": "1",
    "name": HOSTILE,
    "used_mb": 20480,
    "total_mb": 40960,
    "utilisation_percent": None,
    "free": False,
    "reason": "in use",
    "lease": {"user": "alice"},
    "processes": [{"user": "bob"}, {"user": "alice"}, {"user": None}, 7],
    "problem": None,
    "idle": {"idle_s": 1500.5, "sentence": "idle"},
}


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Puts a program ``ssh`` with this Python code first in PATH; returns the file that it adds its arguments to."""
    programs, arguments = folder / "bin", folder / "arguments"
    programs.mkdir(exist_ok=True)
    script = f"#!{sys.executable} -IS\nimport sys, os, time, json\n"
    script += f"open({str(arguments)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n{body}\n"
    (programs / "ssh").write_text(script)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return arguments


def printing(*gpus: dict[str, object], **more: object) -> str:
    """Code that prints these GPUs as ``gpuherd gpus --json`` does."""
    return f"print({json.dumps({'problem': None, 'gpus': gpus, **more})!r})"
