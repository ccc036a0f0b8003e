"""Finding models on the Hub: against a local server that answers as the Hub does, and against no server at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from tests.models.local_hub import WEIGHTS, Hub, play, running

from gpuherd.errors import BadModel, GpuherdError
from gpuherd.models.checkpoints.hub import choose_files, locate
from gpuherd.models.names import ModelRef, parse_model


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as server:
        yield server


Find = Callable[..., str]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Find:
    """``find(model, cache, endpoint, offline=False, for_loading=False)``: where ``locate`` says it is, or the error."""

    def found(model: str, cache: Path, endpoint: str, *, offline: bool = False, for_loading: bool = False) -> str:
        play(monkeypatch, endpoint, cache, offline=offline)
        try:
            return str(locate(parse_model(model), for_loading=for_loading, waits=(0.01, 0.01)))
        except GpuherdError as problem:
            return f"{type(problem).__name__} {problem}"

    return found


def test_only_config_and_one_format_are_downloaded(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], find: Find
) -> None:
    folder = find("org/model", tmp_path, hub.url)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    told = capfd.readouterr()
    assert not told.out and "%|" not in told.err and "it/s" not in told.err  # no progress bars


def test_offline_uses_what_was_downloaded(hub: Hub, tmp_path: Path, find: Find) -> None:
    first = find("org/model", tmp_path, hub.url)
    hub.asked.clear()
    assert find("org/model", tmp_path, hub.url, offline=True) == first
    assert not hub.asked
    # Without a network, but not told so: the same after the tries.
    assert find("org/model", tmp_path, "http://127.0.0.1:9") == first


def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path, find: Find) -> None:
    hub.failures = 2
    folder = find("org/model", tmp_path, hub.url)
    assert (Path(folder) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("org/absent", "MissingModel model 'org/absent' is not on the Hugging Face Hub, or is private"),
        ("org/model@v9", "MissingModel model 'org/model@v9': the repository has no revision 'v9'"),
        ("org/gated", "MissingModel model 'org/gated' is gated: accept its licence"),
        ("org/gguf", "BadModel model 'org/gguf' has several GGUF files (model-q4.gguf, model-q8.gguf)"),
    ],
)
def test_reasons_are_told_apart(hub: Hub, tmp_path: Path, model: str, reason: str, find: Find) -> None:
    said = find(model, tmp_path, hub.url)
    assert said.startswith(reason) and "\n" not in said


def test_no_network_and_nothing_in_the_cache(tmp_path: Path, find: Find) -> None:
    said = find("org/model", tmp_path, "http://127.0.0.1:9")
    assert said.startswith(
        "MissingModel model 'org/model' is not in the local cache, and the Hugging Face Hub can't be"
    )
    said = find("org/model", tmp_path, "http://127.0.0.1:9", offline=True)
    assert "HF_HUB_OFFLINE is set" in said


def test_a_cache_that_can_not_be_written(hub: Hub, tmp_path: Path, find: Find) -> None:
    (tmp_path / "file").write_bytes(b"")
    said = find("org/model", tmp_path / "file" / "cache", hub.url)
    assert said.startswith("CannotWrite model 'org/model' can't be stored in the local cache")


def test_a_disk_without_room_is_known_before_the_download(hub: Hub, tmp_path: Path, find: Find) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    said = find("org/model", tmp_path / "new" / "cache", hub.url)
    assert said.startswith("CannotWrite model 'org/model' takes 1,099,511,627,777 MB on the disk of ")
    assert "MB are free; make room, or set HF_HOME" in said
    assert not hub.sent["model.safetensors"]


def test_what_is_in_the_cache_needs_no_room(hub: Hub, tmp_path: Path, find: Find) -> None:
    first = find("org/model", tmp_path, hub.url)
    hub.sizes["model.safetensors"] = 1 << 60
    assert find("org/model", tmp_path, hub.url) == first


def test_an_interrupted_download_goes_on(hub: Hub, tmp_path: Path, find: Find) -> None:
    weights = save({"layer.weight": torch.ones(2500, 2500)})
    hub.repos["org/model"]["model.safetensors"] = weights
    hub.breaks_at = 22_000_000
    folder = find("org/model", tmp_path, hub.url)
    assert (Path(folder) / "model.safetensors").read_bytes() == weights
    # What the library had in its hands is fetched again, at most a piece of 10 MiB; not all of it.
    assert hub.sent["model.safetensors"] < len(weights) + (11 << 20)


def test_files_that_are_complete_are_not_fetched_again(hub: Hub, tmp_path: Path, find: Find) -> None:
    hub.repos["org/model"]["tokenizer.json"] = b"{}"
    find("org/model", tmp_path, hub.url)
    hub.sent.clear()
    folder = find("org/model", tmp_path, hub.url, for_loading=True)
    assert (Path(folder) / "tokenizer.json").exists()
    assert hub.sent["tokenizer.json"] == 2
    assert not hub.sent["model.safetensors"] and not hub.sent["config.json"]


def test_a_local_model_is_where_it_is(tmp_path: Path) -> None:
    assert locate(parse_model(str(tmp_path))) == tmp_path


REF = ModelRef("org/x", repo_id="org/x")


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


def test_what_loading_needs_beside_config_and_weights() -> None:
    files = [
        "config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin.index.json", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "modeling_x.py", "README.md",
        "LICENSE.txt", "USE_POLICY.md", "additional_chat_templates/rag.jinja", "original/params.json", "onnx/a.json",
    ]  # fmt: skip
    loading = [
        "additional_chat_templates/rag.jinja", "chat_template.jinja", "config.json", "generation_config.json",
        "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    assert choose_files(files, REF) == ["config.json", "model.safetensors"]
    assert choose_files(files, REF, for_loading=True) == loading
    assert choose_files(files, REF, for_loading=True, with_code=True) == sorted([*loading, "modeling_x.py"])


@pytest.mark.parametrize("files", [[], ["README.md"], ["config.json"], ["sub/model.safetensors"], ["tf_model.h5"]])
def test_no_weights_to_choose(files: list[str]) -> None:
    with pytest.raises(BadModel, match="no safetensors, PyTorch or GGUF weights"):
        choose_files(files, REF)
