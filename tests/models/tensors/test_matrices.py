"""Which matrices a model has, and that each holds the numbers that the model computes with."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.module import module_source
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.subject import count_weights
from gpuherd.models.tensors.fused import layout_of
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import FloatArray

Tiny = Callable[..., tuple[Any, Path]]


def analysed(folder: Path, **options: bool) -> dict[str, WeightMatrix]:
    return {m.longname: m for m in matrices(open_checkpoint(folder), **options) if m.skip is None}


def read(matrix: WeightMatrix) -> FloatArray:
    (only,) = matrix.slices()
    assert only.shape == matrix.shape and only.size == matrix.params
    return only


DBRX = {"rope_theta": 1e4, "clip_qkv": 8}
# model, changes of its config, the fused module of layer 0, and how many query heads share a key head.
FUSED = [
    ("gpt2", {}, "transformer.h.0.attn.c_attn"),
    ("gpt_neox", {}, "gpt_neox.layers.0.attention.query_key_value"),
    ("bloom", {}, "transformer.h.0.self_attention.query_key_value"),
    ("falcon", {}, "transformer.h.0.self_attention.query_key_value"),
    ("falcon", {"multi_query": False}, "transformer.h.0.self_attention.query_key_value"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "transformer.h.0.self_attention.query_key_value"),
    ("falcon", {"multi_query": None}, "transformer.h.0.self_attention.query_key_value"),
    ("falcon", {"num_kv_heads": 2}, "transformer.h.0.self_attention.query_key_value"),  # which counts for nothing
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}, "transformer.h.0.self_attention.query_key_value"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}, "transformer.h.0.self_attention.query_key_value"),
    ("gpt_neox_japanese", {}, "gpt_neox_japanese.layers.0.attention.query_key_value"),
    ("dbrx", {}, "transformer.blocks.0.norm_attn_norm.attn.Wqkv"),
    ("dbrx", {"attn_config": DBRX}, "transformer.blocks.0.norm_attn_norm.attn.Wqkv"),  # one key head by default
    ("dbrx", {"attn_config": DBRX | {"kv_n_heads": 4}}, "transformer.blocks.0.norm_attn_norm.attn.Wqkv"),
    ("phi3", {}, "model.layers.0.self_attn.qkv_proj"),
    ("phi3", {"num_key_value_heads": None}, "model.layers.0.self_attn.qkv_proj"),
    ("phi3", {"num_key_value_heads": 1}, "model.layers.0.self_attn.qkv_proj"),
    ("phi3", {"head_dim": 16}, "model.layers.0.self_attn.qkv_proj"),
    ("gpt_bigcode", {}, "transformer.h.0.attn.c_attn"),
    ("gpt_bigcode", {"multi_query": False}, "transformer.h.0.attn.c_attn"),
    ("mpt", {}, "transformer.blocks.0.attn.Wqkv"),
    ("codegen", {}, "transformer.h.0.attn.qkv_proj"),
    ("persimmon", {"qk_layernorm": False}, "model.layers.0.self_attn.query_key_value"),
]


def keys_and_values(model: Any, module: str) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """What the model itself makes of one token: the fused projection's input, its output, and the keys and values
    that the model puts in its cache. At position 0 rotary embeddings turn nothing."""
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(module).register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = model(torch.tensor([[5]]), use_cache=True).past_key_values
    hook.remove()
    layer = cache.layers[0]
    return tuple(part.double().numpy().reshape(-1) for part in (seen[0], seen[1], layer.keys, layer.values))  # type: ignore[return-value]


@pytest.mark.parametrize(("model_type", "changes", "module"), FUSED)
def test_fused_attention_is_split_as_the_model_itself_splits_it(
    tiny: Tiny, model_type: str, changes: Mapping[str, Any], module: str
) -> None:
    model, folder = tiny(model_type, **changes)
    found = analysed(folder)
    transposed = model_type == "gpt2"
    q, k, v = (read(found[f"{module}_{part}"]) for part in "qkv")
    if transposed:
        q, k, v = q.T, k.T, v.T
    x, fused_out, keys, values = keys_and_values(model, module)
    bias = model.get_submodule(module).bias
    fused = model.get_submodule(module).weight.detach().numpy()
    fused = fused.T if transposed else fused
    offset = np.zeros(len(fused)) if bias is None else bias.detach().numpy()
    # Each row of a part is a row of the fused weight, bit for bit; find which, to know its bias.
    row_of = {row.tobytes(): number for number, row in enumerate(np.ascontiguousarray(fused))}
    rows = [[row_of[row.tobytes()] for row in np.ascontiguousarray(part)] for part in (q, k, v)]
    assert sorted(itertools.chain(*rows)) == list(range(len(fused)))
    heads = len(keys) // len(k) if len(keys) > len(k) else 1  # Falcon repeats a key head for each query head
    size = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    for part, numbers, cached in ((k, rows[1], keys), (v, rows[2], values)):
        cached = cached.reshape(-1, heads, size)[:, 0].reshape(-1)
        assert np.allclose(part @ x + offset[numbers], cached, atol=1e-5)
    # What is left are the queries, in the order of the heads.
    assert rows[0] == sorted(rows[0])
    assert np.allclose(fused @ x + offset, fused_out, atol=1e-5)


# Models without a cache of keys: class, config, the attention of layer 0, and its fused projection within.
WITHOUT_CACHE = [
    ("ModernBert", {"global_attn_every_n_layers": 1, "pad_token_id": 0}, "layers.0.attn", "Wqkv"),
    ("Deberta", {"relative_attention": False, "pos_att_type": None}, "encoder.layer.0.attention.self", "in_proj"),
    ("Blip2Vision", {}, "encoder.layers.0.self_attn", "qkv"),
    ("SamVision", {"image_size": 16, "window_size": 0, "use_rel_pos": False}, "vision_encoder.layers.0.attn", "qkv"),
]


@pytest.mark.parametrize(("family", "changes", "where", "fused"), WITHOUT_CACHE)
def test_fused_attention_of_models_without_a_cache(
    family: str, changes: Mapping[str, Any], where: str, fused: str
) -> None:
    """Attention without values gives nothing; without queries or without keys it gives the mean value."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    images = {"image_size": 8, "patch_size": 4}
    looks = "Vision" in family
    rest = images if looks else {"vocab_size": 64, "max_position_embeddings": 16}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **rest, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}Model")(config).eval()
    attention = model.get_submodule(where)
    weight = attention.get_submodule(fused).weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
        for name, parameter in attention.named_parameters():
            if "bias" in name:
                parameter.zero_()
    found = {m.longname: m for m in matrices(module_source(model)) if m.skip is None}
    rows = {row.tobytes(): number for number, row in enumerate(weight.detach().numpy())}
    side = config.image_size if looks else 0
    asked = torch.randn(1, 3, side, side) if looks else torch.tensor([[3, 9, 27, 50]])
    seen: list[torch.Tensor] = []
    attention.register_forward_hook(lambda _, args, out: seen.append(out if isinstance(out, torch.Tensor) else out[0]))

    def without(part: str) -> torch.Tensor:
        """What attention gives for each token where this part is nought."""
        taken = [rows[row.tobytes()] for row in np.ascontiguousarray(read(found[f"{where}.{fused}_{part}"]))]
        with torch.no_grad():
            kept, weight[taken] = weight.clone(), 0.0
            model(asked)
            weight.copy_(kept)
        return seen[-1].reshape(-1, seen[-1].shape[-1])

    def same_for_all(given: torch.Tensor) -> bool:
        return torch.allclose(given, given[:1].expand_as(given), atol=1e-5)

    q, k, v = without("q"), without("k"), without("v")
    assert same_for_all(q) and same_for_all(k) and torch.allclose(q, k, atol=1e-5)
    assert float(q.abs().max()) > 1e-3 and not torch.allclose(q, v, atol=1e-3)
    assert torch.allclose(v, torch.zeros_like(v), atol=1e-5) or same_for_all(v)


def test_the_lightning_attention_of_minimax() -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1
    )
    weight = MiniMaxLightningAttention(config, 0).qkv_proj.weight
    layout = layout_of("model.layers.0.self_attn.qkv_proj.weight", tuple(weight.shape), config.to_dict())
    by_head = weight.detach().reshape(4, 3, 8, 32)  # heads, then 3 of head_dim each, as its forward has it
    assert layout is not None
    for part in range(3):
        assert np.array_equal(layout.take(weight.detach().numpy(), part), by_head[:, part].reshape(-1, 32).numpy())


def test_the_vision_half_of_qwen2_vl() -> None:
    """Without what is called the values, attention gives nothing; without queries or keys it gives the mean value."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=1, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4)
    model = Qwen2VisionTransformerPretrainedModel(config).eval()
    fused = model.blocks[0].attn.qkv
    found = {m.longname: m for m in matrices(module_source(model))}
    after: list[torch.Tensor] = []
    model.blocks[0].attn.proj.register_forward_pre_hook(lambda _, args: after.append(args[0]))
    for part, number in (("q", 0), ("k", 1), ("v", 2)):
        rows = slice(32 * number, 32 * number + 32)
        assert np.array_equal(read(found[f"blocks.0.attn.qkv_{part}"]), fused.weight.detach().numpy()[rows])
        with torch.no_grad():
            kept, fused.weight[rows], fused.bias[rows] = fused.weight.clone(), 0.0, 0.0
            model(torch.randn(16, 3 * 2 * 4 * 4), torch.tensor([[1, 4, 4]]))
            fused.weight.copy_(kept)
        assert bool(after[-1].any()) == (part != "v")


def test_gate_and_up_are_told_apart(tiny: Tiny) -> None:
    model, folder = tiny("phi3")
    found = analysed(folder)
    gate, up = (read(found[f"model.layers.0.mlp.gate_up_proj_{part}"]) for part in ("gate", "up"))
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 32)
    into_down: list[torch.Tensor] = []
    hook = mlp.down_proj.register_forward_hook(lambda _, args, out: into_down.append(args[0]))
    with torch.no_grad():
        mlp(x)
    hook.remove()
    ours = torch.nn.functional.silu(x @ torch.from_numpy(gate).T) * (x @ torch.from_numpy(up).T)
    assert torch.allclose(ours, into_down[0], atol=1e-5)


def test_separate_experts(tiny: Tiny) -> None:
    model, folder = tiny("mixtral")
    found = analysed(folder)
    experts = {name for name in found if ".experts." in name}
    assert len(experts) == 2 * 3 * 3
    fused = model.model.layers[1].mlp.experts.gate_up_proj.detach().numpy()
    for expert in range(3):
        gate = read(found[f"model.layers.1.block_sparse_moe.experts.{expert}.w1"])
        assert np.array_equal(gate, fused[expert, :48])


def test_fused_experts_as_stored_by_gpt_oss(tiny: Tiny) -> None:
    model, folder = tiny("gpt_oss")
    found = analysed(folder)
    assert sum(m.kind == "expert" for m in found.values()) == 2 * 3 * 3
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        for expert in range(3):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            fused = experts.gate_up_proj[expert].detach().numpy()
            # GptOssExperts takes gate_up[..., ::2] as the gate.
            assert np.array_equal(read(found[f"{name}.gate_proj"]), fused[:, ::2])
            assert np.array_equal(read(found[f"{name}.up_proj"]), fused[:, 1::2])
            assert np.array_equal(read(found[f"{name}.down_proj"]), experts.down_proj[expert].detach().numpy())


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_equal_the_unfused(tmp_path: Path, transposed: bool) -> None:
    """(experts, out, in) as transformers stores most, and (experts, in, out) as Llama 4."""
    gate, up, down = torch.randn(4, 6, 5), torch.randn(4, 6, 5), torch.randn(4, 5, 6)
    gate_up = torch.cat([gate, up], dim=1)
    stored = {"gate_up_proj": gate_up.mT if transposed else gate_up, "down_proj": down.mT if transposed else down}
    tensors = {f"model.layers.0.mlp.experts.{name}": t.contiguous() for name, t in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = analysed(tmp_path)
    assert len(found) == 4 * 3
    for expert in range(4):
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            wanted = tensor[expert].numpy()
            got = read(found[f"model.layers.0.mlp.experts.{expert}.{name}"])
            assert np.array_equal(got, wanted.T if transposed else wanted)


def test_experts_of_granite_and_of_dbrx(tmp_path: Path) -> None:
    fused = torch.randn(3, 8, 5)
    save_file(
        {
            "model.layers.0.block_sparse_moe.input_linear.weight": fused,
            "model.layers.0.block_sparse_moe.output_linear.weight": torch.randn(3, 5, 4),
            "transformer.blocks.0.ffn.experts.mlp.w1": torch.arange(60.0).reshape(12, 5),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text('{"model_type": "dbrx", "ffn_config": {"moe_num_experts": 3}}')
    found = analysed(tmp_path)
    up = read(found["model.layers.0.block_sparse_moe.input_linear.2_up"])
    assert np.array_equal(up, fused[2, 4:].numpy())
    assert len([name for name in found if "output_linear" in name]) == 3
    assert read(found["transformer.blocks.0.ffn.experts.2.mlp.w1"])[0, 0] == 40


def test_stacked_experts_without_a_number_are_skipped_with_a_reason(tmp_path: Path) -> None:
    save_file({"blocks.0.ffn.experts.mlp.w1": torch.ones(12, 5)}, tmp_path / "model.safetensors")
    (matrix,) = matrices(open_checkpoint(tmp_path))
    assert matrix.skip is not None and "does not say how many" in matrix.skip
    with pytest.raises(BadModel, match="is not analysed"):
        matrix.slices()


def test_every_linear_of_a_model_is_there(tiny: Tiny) -> None:
    for model_type in ("llama", "opt", "gpt_neox"):
        model, folder = tiny(model_type)
        found = analysed(folder)
        # The file of GPT-NeoX calls the head embed_out, the module tree of transformers 5 lm_head.
        head = "embed_out" if model_type == "gpt_neox" else "lm_head"
        linears = {
            name.replace("lm_head", head): m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
        }
        tied = model.config.tie_word_embeddings
        expected = {name for name in linears if "query_key_value" not in name and not (tied and "lm_head" in name)}
        assert expected == {name for name in found if "query_key_value" not in name}
        for name in expected:
            assert np.array_equal(read(found[name]), linears[name].weight.detach().numpy())


def test_embeddings_only_when_asked_for(tiny: Tiny) -> None:
    _, folder = tiny("gpt2")
    skipped = {m.longname: m for m in matrices(open_checkpoint(folder)) if m.skip}
    assert set(skipped) == {"transformer.wte", "transformer.wpe"}
    assert all(m.kind == "embedding" and "--embeddings" in str(m.skip) for m in skipped.values())
    assert set(analysed(folder, embeddings=True)) == set(analysed(folder)) | set(skipped)


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
def test_tied_weights_count_once(tiny: Tiny, tmp_path: Path, stored: str) -> None:
    """safetensors drops the tied head, a pickle has both names for one storage."""
    model, folder = tiny("gpt2")
    if stored == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        folder = tmp_path
    found = list(matrices(open_checkpoint(folder), embeddings=True))
    assert [m.longname for m in found if m.skip is None and m.shape == (64, 32)] == ["transformer.wte"]
    if stored == "bin":
        (head,) = (m for m in found if m.longname == "lm_head")
        assert "tied to transformer.wte.weight" in str(head.skip)


def test_tied_by_the_config(tmp_path: Path) -> None:
    def skips(tied: str, tensors: dict[str, torch.Tensor]) -> dict[str, str | None]:
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(f'{{"tie_word_embeddings": {tied}}}')
        return {m.longname: m.skip for m in matrices(open_checkpoint(tmp_path))}

    both = {"model.embed_tokens.weight": torch.ones(9, 4), "lm_head.weight": torch.ones(9, 4)}
    assert "tied to model.embed_tokens.weight" in str(skips("true", both)["lm_head"])
    assert skips("false", both)["lm_head"] is None
    assert "embedding" in str(skips("true", {"lm_head.weight": torch.ones(9, 4)})["lm_head"])
    other_size = {"model.embed_tokens.weight": torch.ones(9, 4), "lm_head.weight": torch.ones(8, 4)}
    assert skips("true", other_size)["lm_head"] is None
    longer = {"cpmant.input_embedding.weight": torch.ones(12, 4), "lm_head.weight": torch.ones(9, 4)}
    assert skips("true", longer)["lm_head"] is None  # CPM-Ant, whose prompts are embedded too
    # Layers may have outputs too, and so may a model whose embedding has a name that is not known.
    outputs = {f"h.{layer}.output.weight": torch.ones(9, 4) for layer in range(2)}
    assert set(skips("true", outputs).values()) == {None}
    mamba = {"backbone.embeddings.weight": torch.ones(9, 4), "lm_head.weight": torch.ones(9, 4)}
    assert "tied to backbone.embeddings.weight" in str(skips("true", mamba)["lm_head"])


def test_no_two_matrices_have_one_name(tmp_path: Path) -> None:
    """Names are what results are joined by; each of these would be cut to the same as another."""
    tensors = {
        "a.in_proj.weight": torch.randn(6, 2), "a.in_proj_weight": torch.randn(6, 2), "a.in_proj_q": torch.randn(2, 2),
        "b.weight": torch.randn(3, 3), "b_weight": torch.randn(3, 3, 2), "b": torch.randn(2, 2),
        "c.weight.weight": torch.randn(3, 3), "c.weight": torch.randn(3, 3), "c": torch.randn(3, 3),
        "d.experts.up_proj": torch.randn(2, 3, 3), "d.experts.0.up_proj.weight": torch.randn(3, 3),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    found = list(matrices(source))
    names = {m.longname: m.tensor for m in found}
    assert len(names) == len(found) == 14 and set(names.values()) == tensors.keys()
    assert names["a.in_proj"] == "a.in_proj.weight" and names["a.in_proj_weight_q"] == "a.in_proj_weight"
    assert names["d.experts.0.up_proj"] == "d.experts.up_proj"
    assert names["d.experts.0.up_proj.weight"] == "d.experts.0.up_proj.weight"
    # What is analysed besides does not change them.
    assert [m.longname for m in matrices(source, embeddings=True)] == [m.longname for m in found]


def test_a_config_that_contradicts_itself_ties_nothing(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's says no, and its text part, by default, yes: its head is one of its own, in memory and saved."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "moe_intermediate_size": 16, "num_experts": 2,
            "num_experts_per_tok": 1, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
              "patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path)
    for source in (module_source(model), open_checkpoint(tmp_path)):
        assert source.config["tie_word_embeddings"] is False
        assert source.config["text_config"]["tie_word_embeddings"] is True
        (head,) = (m for m in matrices(source) if m.longname == "lm_head")
        assert head.skip is None


def test_of_two_names_for_one_storage_the_one_that_says_what_it_is_counts(tmp_path: Path) -> None:
    """A parameter that a model also keeps under a name of its own would else not be analysed under either."""
    linear = torch.nn.Linear(6, 5, bias=False)
    model = torch.nn.Module()
    model.own, model.fc = linear.weight, linear
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for source in (module_source(model), open_checkpoint(tmp_path)):
        assert next(iter(source.tensors)) == "own"
        skips = {m.longname: m.skip for m in matrices(source)}
        assert skips == {"own": "tied to fc.weight, counted there", "fc": None}
        assert count_weights(source.tensors, list(matrices(source))) == 30


@pytest.mark.parametrize("kernel", [(3,), (3, 2), (2, 3, 2)])
def test_convolutions_are_one_matrix_for_each_kernel_position(tmp_path: Path, kernel: tuple[int, ...]) -> None:
    weight = torch.randn(6, 5, *kernel)
    save_file({"features.0.weight": weight}, tmp_path / "model.safetensors")
    (matrix,) = matrices(open_checkpoint(tmp_path))
    assert (matrix.kind, matrix.shape, matrix.params, matrix.skip) == ("conv", (6, 5), weight.numel(), None)
    slices = matrix.slices()
    positions = list(np.ndindex(*kernel))
    assert len(slices) == len(positions)
    for got, position in zip(slices, positions, strict=True):
        assert np.array_equal(got, weight[(slice(None), slice(None), *position)].numpy())


def test_multihead_attention_of_torch(tmp_path: Path) -> None:
    layer = torch.nn.MultiheadAttention(8, 2)
    save_file({f"attn.{name}": t for name, t in layer.state_dict().items()}, tmp_path / "model.safetensors")
    found = analysed(tmp_path)
    assert set(found) == {"attn.in_proj_q", "attn.in_proj_k", "attn.in_proj_v", "attn.out_proj"}
    third = layer.state_dict()["in_proj_weight"][8:16].numpy()
    assert np.array_equal(read(found["attn.in_proj_k"]), third)


def test_what_is_no_weight_matrix_is_listed_with_a_reason(tmp_path: Path) -> None:
    save_file(
        {
            "h.0.attn.bias": torch.ones(1, 1, 4, 4),
            "position_ids": torch.arange(4).reshape(1, 4),
            "pos_embed": torch.ones(1, 5, 8),
            "mixer.A_log": torch.ones(8, 4),
            "norm.weight": torch.ones(8),
            "embeddings.patch_embedding.weight": torch.ones(8, 3, 2, 2),
            "six.weight": torch.ones(1, 1, 1, 1, 1, 2),
            "h.0.c_proj.weight": torch.ones(4, 4),
        },
        tmp_path / "model.safetensors",
    )
    found = {m.longname: m for m in matrices(open_checkpoint(tmp_path))}
    assert {name for name, m in found.items() if m.skip is None} == {
        "h.0.c_proj",
        "embeddings.patch_embedding",
    }
    assert "norm" not in found and len(found) == 7
    assert "I64" in str(found["position_ids"].skip) and "a mask" in str(found["h.0.attn.bias"].skip)


def test_order_is_natural(tmp_path: Path) -> None:
    save_file({f"h.{n}.mlp.weight": torch.ones(2, 2) for n in (10, 2, 1, 0, 11)}, tmp_path / "model.safetensors")
    assert [m.longname for m in matrices(open_checkpoint(tmp_path))] == [f"h.{n}.mlp" for n in (0, 1, 2, 10, 11)]


def test_parts_that_are_blocks_of_rows_are_read_alone(tiny: Tiny) -> None:
    """Counted in bytes at the file: the three parts of phi3's fused weight together read it once."""
    _, folder = tiny("phi3")
    checkpoint = open_checkpoint(folder)
    found = {m.longname: m for m in matrices(checkpoint)}
    parts = [found[f"model.layers.0.self_attn.qkv_proj_{p}"] for p in "qkv"]
    before = _bytes_read()
    read_now = sum(part.slices()[0].nbytes for part in parts)
    assert _bytes_read() - before < read_now + 4096


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt2", [f"transformer.h.0.attn.c_attn_{p}" for p in "qkv"]),
        ("gpt_neox", [f"gpt_neox.layers.0.attention.query_key_value_{p}" for p in "qkv"]),
    ],
)
def test_parts_cost_their_own_bytes_each_time(tiny: Tiny, model: str, names: list[str]) -> None:
    """Columns of GPT-2 and the heads' rows of GPT-NeoX are read by themselves; a second look reads them again."""
    found = {m.longname: m for m in matrices(open_checkpoint(tiny(model)[1]))}
    stored = 4 * sum(found[name].params for name in names)
    before = _bytes_read()
    parts = [read(found[name]) for name in names]
    assert stored <= _bytes_read() - before < stored + 4096
    again = [read(found[name]) for name in reversed(names)]
    assert 2 * stored <= _bytes_read() - before < 2 * stored + 8192
    assert all(np.array_equal(one, other) for one, other in zip(parts, reversed(again), strict=True))


def test_parts_that_alternate_come_of_one_read(tiny: Tiny) -> None:
    """Also when they are asked for again, which reads anew and keeps nothing."""
    names = [f"model.layers.0.mlp.experts.1.{p}_proj" for p in ("gate", "up")]
    found = {m.longname: m for m in matrices(open_checkpoint(tiny("gpt_oss")[1]))}
    stored = 4 * sum(found[name].params for name in names)
    before = _bytes_read()
    parts = [read(found[name]) for name in names]
    assert stored <= _bytes_read() - before < stored + 4096
    again = [read(found[name]) for name in reversed(names)]
    assert _bytes_read() - before >= stored * (1 + len(names))
    assert all(np.array_equal(one, other) for one, other in zip(parts, reversed(again), strict=True))
    freed = [weakref.ref(part if part.base is None else part.base) for part in parts]
    del parts
    assert not any(array() is not None for array in freed)


def _bytes_read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_hostile_config_and_hostile_names(tmp_path: Path) -> None:
    """Odd types where text or numbers are expected, a number of 5,000 digits, and a billion experts of no size."""
    save_file(
        {
            "h.0.query_key_value.weight": torch.ones(12, 4),
            f"h.{'9' * 5000}.weight": torch.ones(2, 2),
            "h.0.ffn.experts.mlp.w1": torch.ones(4, 4),
            "h.0.experts.gate_up_proj": torch.ones(10**9, 0, 4),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(
        '{"model_type": ["bloom"], "n_head": "4", "tie_word_embeddings": 1, "ffn_config": {"moe_num_experts": true},'
        ' "text_config": {"model_type": {}, "n_head": -3}, "quantization_config": null}'
    )
    found = {m.longname: m for m in matrices(open_checkpoint(tmp_path))}
    assert len(found) == 4
    assert {name for name, m in found.items() if m.skip is None} == {"h.0.query_key_value", f"h.{'9' * 5000}"}
