"""Models of the Hub looked over by their headers before anything is downloaded, against a local server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from tests.models.local_hub import Hub, play, running

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.hub_headers import FIRST_BYTES, HubHeaders
from gpuherd.models.names import parse_model
from gpuherd.models.subject import Preflight, SpectraOf, examine

CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = {
    "model.embed_tokens.weight": torch.zeros(500, 64),
    "model.layers.0.self_attn.q_proj.weight": torch.zeros(128, 64),
    "model.layers.0.mlp.up_proj.weight": torch.zeros(300, 200),
}
WHOLE = Preflight(
    "model",
    "hub",
    total_bytes=4 * (500 * 64 + 128 * 64 + 300 * 200),
    largest_side=200,
    num_matrices=2,
    params=500 * 64 + 128 * 64 + 300 * 200,
    params_analysed=128 * 64 + 300 * 200,
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running() as server:
        server.repos["org/whole"] = {"config.json": CONFIG, "model.safetensors": save(WEIGHTS)}
        server.repos["org/lora"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
        server.repos["org/pickles"] = {"config.json": CONFIG, "pytorch_model.bin": b"0" * 1000}
        codes = json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}).encode()
        packed = save({"model.layers.0.mlp.up_proj.qweight": torch.zeros(25, 300, dtype=torch.int32)})
        server.repos["org/codes"] = {"config.json": codes, "model.safetensors": packed}
        play(monkeypatch, server.url, tmp_path)
        yield server


def look(
    model: str, base: str | None = None, relation: str | None = None, spectra_of: SpectraOf = "weights"
) -> Preflight:
    with HubHeaders([parse_model(model)]) as read_hub:
        return examine(model, base=base, relation=relation, spectra_of=spectra_of, read_hub=read_hub)


def test_a_model_is_known_by_its_headers(hub: Hub) -> None:
    assert look("org/whole") == WHOLE
    assert hub.sent["model.safetensors"] <= FIRST_BYTES
    assert look("org/whole", base="org/whole", spectra_of="delta").largest_side == 200


def test_an_adapter_takes_what_its_base_takes(hub: Hub, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file(WEIGHTS, base / "model.safetensors")
    (base / "config.json").write_bytes(CONFIG)
    for named in ("org/whole", str(base)):
        found = look("org/lora", base=named, relation="lora")
        assert found == Preflight("adapter", "hub", base=named, largest_side=200)
    assert look("org/lora", base="org/whole", relation="lora", spectra_of="ba").largest_side is None


@pytest.mark.parametrize("model", ["org/lora", "org/pickles", "org/codes", "org/none", "org/gated"])
def test_what_the_headers_do_not_tell_is_left_to_the_job(hub: Hub, model: str) -> None:
    assert look(model) == Preflight("model", "hub")


def test_a_model_without_a_matrix_is_refused_before_its_job(hub: Hub) -> None:
    hub.repos["org/none"] = {"config.json": CONFIG, "model.safetensors": save({"norm.weight": torch.zeros(3)})}
    with pytest.raises(BadModel, match="org/none' has no weight matrix"):
        look("org/none")


def test_without_a_network_what_was_learnt_or_downloaded_before_will_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import snapshot_download

    look("org/whole")
    for offline in (False, True):
        play(monkeypatch, "http://127.0.0.1:9", tmp_path, offline=offline)
        assert look("org/whole") == WHOLE
        assert look("org/other") == Preflight("model", "hub")
    play(monkeypatch, hub.url, tmp_path)
    snapshot_download("org/whole")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for endpoint, offline in (("http://127.0.0.1:9", False), (hub.url, True)):
        play(monkeypatch, endpoint, tmp_path, offline=offline)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
        assert look("org/whole") == WHOLE


def test_a_hub_that_is_gone_is_asked_once_for_many_models(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_answer() -> str:
        asked.append(1)
        return "no route"

    monkeypatch.setattr("gpuherd.models.checkpoints.hub.no_answer", no_answer)
    refs = [parse_model(f"org/m{number}") for number in range(50)]
    with HubHeaders(refs) as read_hub:
        assert [read_hub(ref) for ref in refs] == [None] * 50
    assert asked == [1] and not hub.asked
