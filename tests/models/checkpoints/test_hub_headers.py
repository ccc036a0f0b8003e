"""A model of the Hub known by its headers: against a local server that answers as the Hub does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.models.local_hub import CONFIG, WEIGHTS, Hub, play, running

from gpuherd.errors import GpuherdError
from gpuherd.models.checkpoints.hub_headers import FIRST_BYTES, read_remote
from gpuherd.models.names import parse_model


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as server:
        yield server


Read = Callable[..., list[Any]]
Say = Callable[..., str]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """``say(model, cache, endpoint, offline=False)``: what reading the model gave, or the error."""

    def told(model: str, cache: Path, endpoint: str, *, offline: bool = False) -> str:
        play(monkeypatch, endpoint, cache, offline=offline)
        try:
            found = read_remote(parse_model(model), waits=(0.01, 0.01))
        except GpuherdError as problem:
            return f"{type(problem).__name__} {problem}"
        tensors = [[info.name, list(info.shape), info.dtype, info.nbytes] for info in found.tensors.values()]
        return json.dumps([found.commit, dict(found.config), tensors, found.nbytes])

    return told


@pytest.fixture
def read(say: Say) -> Read:
    """The same for a model that can be read."""

    def content(model: str, cache: Path, endpoint: str, *, offline: bool = False) -> list[Any]:
        said = say(model, cache, endpoint, offline=offline)
        assert said.startswith("["), said
        found: list[Any] = json.loads(said)
        return found

    return content


def test_only_the_headers_are_asked_for(hub: Hub, tmp_path: Path, read: Read) -> None:
    hub.repos["org/model"]["model.safetensors"] = save(
        {"big.weight": torch.zeros(1000, 1000), "small.weight": torch.zeros(3, dtype=torch.bfloat16)}
    )
    commit, config, tensors, nbytes = read("org/model", tmp_path, hub.url)
    assert (commit, config) == (hub.commit, {"model_type": "tiny"})
    assert sorted(tensors) == [["big.weight", [1000, 1000], "F32", 4_000_000], ["small.weight", [3], "BF16", 6]]
    assert nbytes == len(hub.repos["org/model"]["model.safetensors"])
    assert hub.sent["model.safetensors"] <= FIRST_BYTES
    assert hub.sent["pytorch_model.bin"] == 0


def test_what_was_learnt_is_kept(hub: Hub, tmp_path: Path, read: Read) -> None:
    first = read("org/model", tmp_path, hub.url)
    hub.asked.clear()
    hub.sent.clear()
    assert read("org/model", tmp_path, hub.url) == first
    models = [path for path in hub.asked if path.startswith("/api/models/")]
    assert models == ["/api/models/org/model"] and not hub.sent["model.safetensors"]  # only which commit it is now
    hub.asked.clear()
    assert read("org/model", tmp_path, hub.url, offline=True) == first
    assert read(f"org/model@{hub.commit}", tmp_path, hub.url) == first
    assert not hub.asked
    assert read("org/model", tmp_path, "http://127.0.0.1:9") == first  # no network, but not told so


def test_a_new_commit_is_looked_at(hub: Hub, tmp_path: Path, read: Read) -> None:
    first = read("org/model", tmp_path, hub.url)
    hub.commit = "b" * 40
    hub.repos["org/model"]["model.safetensors"] = save({"other.weight": torch.ones(2, 2)})
    second = read("org/model", tmp_path, hub.url)
    assert second[0] == hub.commit and second[2] == [["other.weight", [2, 2], "F32", 16]]
    assert read(f"org/model@{first[0]}", tmp_path, hub.url, offline=True) == first


def test_a_damaged_memory_costs_a_request(hub: Hub, tmp_path: Path, read: Read) -> None:
    first = read("org/model", tmp_path, hub.url)
    for path in (tmp_path / "gpuherd" / "headers").rglob("*.json"):
        path.write_text("[]" if path.name.startswith("rev") else '{"version": 1, "config": {}, "tensors": [1]}')
    assert read("org/model", tmp_path, hub.url) == first


def test_a_cache_that_can_not_be_written(hub: Hub, tmp_path: Path, read: Read) -> None:
    (tmp_path / "gpuherd").write_bytes(b"")
    assert read("org/model", tmp_path, hub.url)[1] == {"model_type": "tiny"}


def test_a_long_header_and_a_server_without_ranges(hub: Hub, tmp_path: Path, read: Read) -> None:
    tensors = {f"layers.{number}.a_name_that_is_rather_long.weight": torch.ones(1) for number in range(2000)}
    hub.repos["org/model"]["model.safetensors"] = save(tensors)
    assert len(read("org/model", tmp_path / "one", hub.url)[2]) == 2000
    hub.ranges = False
    assert len(read("org/model", tmp_path / "two", hub.url)[2]) == 2000


def test_shards(hub: Hub, tmp_path: Path, read: Read, say: Say) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {"a.weight": names[0], "b.weight": names[1]}
    hub.repos["org/sharded"] = {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        names[0]: save({"a.weight": torch.ones(2, 3)}),
        names[1]: save({"b.weight": torch.ones(4)}),
        "consolidated.safetensors": WEIGHTS,
    }
    _, _, tensors, nbytes = read("org/sharded", tmp_path, hub.url)
    assert [entry[:2] for entry in tensors] == [["a.weight", [2, 3]], ["b.weight", [4]]]
    assert nbytes == sum(len(hub.repos["org/sharded"][name]) for name in names)
    index = hub.repos["org/sharded"].pop("model.safetensors.index.json")
    assert len(read("org/sharded", tmp_path / "no-index", hub.url)[2]) == 2
    del hub.repos["org/sharded"][names[1]]
    assert say("org/sharded", tmp_path / "short", hub.url).startswith("MissingModel model 'org/sharded' has 1 of 2")
    hub.repos["org/sharded"]["model.safetensors.index.json"] = index
    said = say("org/sharded", tmp_path / "absent", hub.url)
    assert said.startswith(
        f"MissingModel model 'org/sharded': its index lists shard '{names[1]}', but it is not in the repository's top "
    )


INDEXES = [
    ({}, "its file 'model.safetensors.index.json' has no weight_map"),
    ([], "its file 'model.safetensors.index.json' has no weight_map"),
    ({"a.weight": 5}, "its index lists shard '5', but it is not in the repository's top folder (tensor 'a.weight')"),
    ({"a.weight": "sub/model.safetensors"}, "its index lists shard 'sub/model.safetensors', but it is not in"),
    ({"a.weight": "part.safetensors", "b.weight": "part.safetensors"}, "says that tensor 'b.weight' is in 'part.safet"),
]


def test_an_index_that_is_not_true(hub: Hub, tmp_path: Path, say: Say) -> None:
    weights = save({"a.weight": torch.ones(2)})
    for number, (weight_map, reason) in enumerate(INDEXES):
        index = json.dumps({"weight_map": weight_map}).encode()
        hub.repos[f"org/index{number}"] = {
            "model.safetensors.index.json": index, "part.safetensors": weights, "sub/model.safetensors": weights,
        }  # fmt: skip
        assert reason in say(f"org/index{number}", tmp_path, hub.url)


def test_a_hub_that_tells_no_sizes(hub: Hub, tmp_path: Path, read: Read, say: Say) -> None:
    hub.tells_sizes = False
    assert read("org/model", tmp_path, hub.url)[2] == [["layer.weight", [3, 3], "F32", 36]]
    for number, header in enumerate((b"[]", b'{"a":5}', b"nope")):
        weights = len(header).to_bytes(8, "little") + header
        hub.repos[f"org/odd{number}"] = {"config.json": CONFIG, "model.safetensors": weights}
        assert "BadModel" in say(f"org/odd{number}", tmp_path, hub.url)


def test_other_formats_are_known_by_config_and_size(hub: Hub, tmp_path: Path, read: Read) -> None:
    del hub.repos["org/model"]["model.safetensors"]
    _, config, tensors, nbytes = read("org/model", tmp_path, hub.url)
    assert (config, tensors, nbytes) == ({"model_type": "tiny"}, [], 50)


def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path, read: Read) -> None:
    hub.failures = 2
    assert read("org/model", tmp_path, hub.url)[1] == {"model_type": "tiny"}


def test_reasons_are_told_apart(hub: Hub, tmp_path: Path, say: Say) -> None:
    hub.repos["org/adapter"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
    models = ("org/absent", "org/model@v9", "org/gated", "org/gguf", "org/adapter")
    said = [say(model, tmp_path, hub.url) for model in models]
    reasons = [
        "MissingModel model 'org/absent' is not on the Hugging Face Hub, or is private",
        "MissingModel model 'org/model@v9': the repository has no revision 'v9'",
        "MissingModel model 'org/gated' is gated: accept its licence",
        "BadModel model 'org/gguf' has several GGUF files",
        "OnlyAdapter model 'org/adapter' is an adapter, no model of its own",
    ]
    assert all(line.startswith(reason) for line, reason in zip(said, reasons, strict=True)), said


def test_nothing_known_and_no_network(tmp_path: Path, say: Say) -> None:
    said = say("org/model", tmp_path, "http://127.0.0.1:9")
    assert said.startswith(
        "MissingModel model 'org/model' is not in the local cache, and the Hugging Face Hub can't be"
    )
    assert "HF_HUB_OFFLINE is set" in say("org/model", tmp_path, "http://127.0.0.1:9", offline=True)


DAMAGED = [
    ("model.safetensors", b"", "'model.safetensors' is truncated or no safetensors file"),
    ("model.safetensors", b"\xff" * 200, "'model.safetensors' is truncated or no safetensors file"),
    ("model.safetensors", WEIGHTS[:-5], "model.safetensors is truncated: it has"),
    ("model.safetensors", (4).to_bytes(8, "little") + b"nope", "model.safetensors has a damaged header"),
    ("config.json", b"{", "its file 'config.json' can't be read as JSON"),
    ("config.json", b"[]", "its file 'config.json' holds no JSON object"),
    ("config.json", b" " * 5_000_002, "its file 'config.json' has more than 5000000 bytes"),
]


def test_damaged_files_are_named(hub: Hub, tmp_path: Path, say: Say) -> None:
    for number, (name, content, _) in enumerate(DAMAGED):
        hub.repos[f"org/damaged{number}"] = {**hub.repos["org/model"], name: content}
    said = [say(f"org/damaged{number}", tmp_path, hub.url) for number in range(len(DAMAGED))]
    for line, (_, _, reason) in zip(said, DAMAGED, strict=True):
        assert line.startswith("BadModel ") and reason in line
