"""Finding models on the Hub: against a local server that answers as the Hub does, and against no server at all.

huggingface_hub reads its settings when it is imported, so that each case runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save

from gpuherd.errors import BadModel
from gpuherd.models.locate import choose_files, locate
from gpuherd.models.names import ModelRef, parse_model

COMMIT = "a" * 40
CONFIG = b'{"model_type": "tiny"}'
WEIGHTS = save({"layer.weight": torch.ones(3, 3)})


class Hub(ThreadingHTTPServer):
    """A few of the Hub's endpoints. ``failures`` is how many requests are answered 503 first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos = {
            "org/model": {"config.json": CONFIG, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"x" * 50,
                          "README.md": b"hello", "onnx/model.onnx": b"y" * 50, "original/model.pth": b"z"},
            "org/gated": {"config.json": CONFIG, "model.safetensors": WEIGHTS},
            "org/gguf": {"model-q4.gguf": b"GGUF", "model-q8.gguf": b"GGUF"},
        }  # fmt: skip
        self.failures = 0
        self.asked: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        """Keeps the test output clean."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked[path] += 1
        if self.server.failures > 0:
            self.server.failures -= 1
            self.reply(503, b"busy")
        elif path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"))
        else:
            repo, _, rest = path[1:].partition("/resolve/")
            self.file(repo, rest.partition("/")[2])

    def api(self, path: str) -> None:
        repo = "/".join(path.split("/")[:2])
        kind, _, revision = path[len(repo) + 1 :].partition("/")
        files = self.server.repos.get(repo)
        if files is None:
            self.reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("", "main", COMMIT):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            entries = [{"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                       for name, data in files.items()]  # fmt: skip
            self.reply(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": name} for name in files]
            self.reply(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def file(self, repo: str, name: str) -> None:
        if repo == "org/gated":
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        data = self.server.repos.get(repo, {}).get(name)
        if data is None:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        self.reply(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{oid(data)}"'})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


CODE = """
import sys
from gpuherd.errors import GpuherdError
from gpuherd.models.locate import locate
from gpuherd.models.names import parse_model
try:
    print(locate(parse_model(sys.argv[1]), waits=(0.01, 0.01)))
except GpuherdError as problem:
    print(type(problem).__name__, problem)
"""


def find(model: str, cache: Path, endpoint: str, **env: str) -> tuple[str, str]:
    """What ``locate`` printed, and all that went to standard error."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", CODE, model], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_only_config_and_one_format_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    folder, log = find("org/model", tmp_path, hub.url)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert "%|" not in log and "it/s" not in log  # no progress bars


def test_offline_uses_what_was_downloaded(hub: Hub, tmp_path: Path) -> None:
    first, _ = find("org/model", tmp_path, hub.url)
    hub.asked.clear()
    assert find("org/model", tmp_path, hub.url, HF_HUB_OFFLINE="1")[0] == first
    assert not hub.asked
    # Without a network, but not told so: the same after the tries.
    assert find("org/model", tmp_path, "http://127.0.0.1:9")[0] == first


def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.failures = 2
    folder, log = find("org/model", tmp_path, hub.url)
    assert (Path(folder) / "model.safetensors").exists(), log


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("org/absent", "MissingModel model 'org/absent' is not on the Hugging Face Hub, or is private"),
        ("org/model@v9", "MissingModel model 'org/model@v9': the repository has no revision 'v9'"),
        ("org/gated", "MissingModel model 'org/gated' is gated: accept its licence"),
        ("org/gguf", "BadModel model 'org/gguf' has several GGUF files (model-q4.gguf, model-q8.gguf)"),
    ],
)
def test_reasons_are_told_apart(hub: Hub, tmp_path: Path, model: str, reason: str) -> None:
    said, _ = find(model, tmp_path, hub.url)
    assert said.startswith(reason) and "\n" not in said


def test_no_network_and_nothing_in_the_cache(tmp_path: Path) -> None:
    said, _ = find("org/model", tmp_path, "http://127.0.0.1:9")
    assert said.startswith(
        "MissingModel model 'org/model' is not in the local cache, and the Hugging Face Hub can't be"
    )
    said, _ = find("org/model", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in said


def test_a_cache_that_can_not_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    said, _ = find("org/model", tmp_path / "file" / "cache", hub.url)
    assert said.startswith("CannotWrite model 'org/model' can't be stored in the local cache")


def test_a_local_model_is_where_it_is(tmp_path: Path) -> None:
    assert locate(parse_model(str(tmp_path))) == tmp_path


REF = ModelRef("org/x", "hub", repo_id="org/x")


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], ["config.json", "model.safetensors"]),
        (["config.json", "pytorch_model.bin", "training_args.bin"], ["config.json", "pytorch_model.bin"]),
        (["adapter_config.json", "adapter_model.bin", "optimizer.pt"], ["adapter_config.json", "adapter_model.bin"]),
        (["config.json", "model-Q4_K_M.gguf", "mmproj-f16.gguf"], ["model-Q4_K_M.gguf"]),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
             "pytorch_model.bin.index.json", "consolidated.00.pth", "checkpoint-5/model.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
        ),
    ],
)  # fmt: skip
def test_choice_of_files(files: list[str], chosen: list[str]) -> None:
    assert choose_files(files, REF) == chosen


@pytest.mark.parametrize("files", [[], ["README.md"], ["config.json"], ["sub/model.safetensors"], ["tf_model.h5"]])
def test_no_weights_to_choose(files: list[str]) -> None:
    with pytest.raises(BadModel, match="no safetensors, PyTorch or GGUF weights"):
        choose_files(files, REF)
