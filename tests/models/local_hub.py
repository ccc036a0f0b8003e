"""A server on this machine that answers as the Hugging Face Hub does, for what asks it over the network."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save

COMMIT = "a" * 40
CONFIG = b'{"model_type": "tiny"}'
WEIGHTS = save({"layer.weight": torch.ones(3, 3)})


class Hub(ThreadingHTTPServer):
    """A few of the Hub's endpoints.

    ``failures`` is how many requests are answered 503 first. ``sent`` counts bytes of files. ``ranges``: whether pieces
    of files can be asked for. ``breaks_at``: after how many bytes the next download breaks off, once.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos = {
            "org/model": {"config.json": CONFIG, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"x" * 50,
                          "README.md": b"hello", "onnx/model.onnx": b"y" * 50, "original/model.pth": b"z"},
            "org/gated": {"config.json": CONFIG, "model.safetensors": WEIGHTS},
            "org/gguf": {"model-q4.gguf": b"GGUF", "model-q8.gguf": b"GGUF"},
        }  # fmt: skip
        self.failures = 0
        self.commit = COMMIT
        self.ranges = True
        self.tells_sizes = True
        self.breaks_at: int | None = None
        self.sizes: dict[str, int] = {}  # of files that are said to be larger than they are
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

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
        elif revision not in ("", "main", self.server.commit):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            entries = [{"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                       for name, data in files.items()]  # fmt: skip
            self.reply(200, json.dumps(entries).encode())
        else:
            siblings = [
                {"rfilename": name, "size": self.size_of(name, data), "blobId": oid(data)}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps({"id": repo, "sha": self.server.commit, "siblings": siblings}).encode())

    def size_of(self, name: str, data: bytes) -> int | None:
        return self.server.sizes.get(name, len(data)) if self.server.tells_sizes else None

    def file(self, repo: str, name: str) -> None:
        if repo == "org/gated":
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        data = self.server.repos.get(repo, {}).get(name)
        if data is None:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": self.server.commit, "ETag": f'"{oid(data)}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.server.ranges:
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            if first >= len(data):
                self.reply(416, b"", headers)
                return
            whole, data = len(data), data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{whole}"
            self.reply(206, data, headers)
        else:
            self.reply(200, data, headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            breaks_at = self.server.breaks_at
            if breaks_at is not None and len(body) > breaks_at:
                self.server.breaks_at, body = None, body[:breaks_at]
                self.close_connection = True
            self.server.sent[urlsplit(self.path).path.rpartition("/")[2]] += len(body)
            self.wfile.write(body)


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    """The server, until the block ends."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def play(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Has huggingface_hub, which reads its settings when it is imported, take this server for the Hub, and this folder
    for the user's."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
