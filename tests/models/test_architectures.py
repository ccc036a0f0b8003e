"""Real architectures, built small: through the worker every tensor has its line, and no number counts twice.

Language models whose head is not the embedding, mixtures, hybrids of attention and state spaces, encoders with
decoders, vision, sound and text with pictures.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.esd.coverage_files import read_coverage

from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import ModelPaths
from gpuherd.esd.selection import totals
from gpuherd.esd.views import read_table
from gpuherd.esd.worker import main
from gpuherd.models.checkpoints.module import module_source
from gpuherd.models.tensors.matrices import matrices

TEXT = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
TWO_TOWERS = {"vocab_size": 96, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
PICTURES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "image_size": 32, "patch_size": 8}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# transformers' config and class, sizes, and the parameters of two or more axes that are no weight matrix, by the ends
# of their names.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "T5 (encoder and decoder)": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}, (),
    ),
    "Jamba (hybrid, experts)": (
        "JambaConfig", "JambaForCausalLM",
        {**TEXT, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8}, ("A_log",),
    ),
    "ViT": ("ViTConfig", "ViTForImageClassification", PICTURES, ("cls_token", "position_embeddings")),
    "BART": ("BartConfig", "BartForConditionalGeneration", {**TWO_TOWERS, "max_position_embeddings": 64}, ()),
    "Whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {**TWO_TOWERS, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, (),
    ),
    "Switch (encoder, decoder, experts)": (
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
        {"vocab_size": 96, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_heads": 4, "num_experts": 4}, (),
    ),
    "Mamba2": (
        "Mamba2Config", "Mamba2ForCausalLM",
        {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 12, "state_size": 16,
         "n_groups": 1}, (),
    ),
    "Qwen3-Next (hybrid, experts)": (
        "Qwen3NextConfig", "Qwen3NextForCausalLM",
        {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": 12, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, (),
    ),
    "LFM2 (hybrid, experts)": (
        "Lfm2MoeConfig", "Lfm2MoeForCausalLM",
        {**TEXT, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}, (),
    ),
    "CLIP (text with pictures)": (
        "CLIPConfig", "CLIPModel",
        {"text_config": {**TEXT, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1},
         "vision_config": PICTURES, "projection_dim": 32}, (),
    ),
    "ConvNeXt": (
        "ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]},
        (),
    ),
    "ResNet (running statistics)": (
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [1, 1], "layer_type": "basic"}, (),
    ),
    "BART (offset of the output)": (
        "BartConfig", "BartForConditionalGeneration",
        {"vocab_size": 96, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "max_position_embeddings": 16}, (),
    ),
    "wav2vec2 (weight norm)": (
        "Wav2Vec2Config", "Wav2Vec2ForCTC",
        {"vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        ("original0", "original1", "masked_spec_embed"),
    ),
    "RWKV": (
        "RwkvConfig", "RwkvForCausalLM",
        {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "context_length": 32},
        ("time_mix_key", "time_mix_value", "time_mix_receptance"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_accounted_for(tmp_path: Path, name: str) -> None:
    config, architecture, sizes, no_matrices = MODELS[name]
    model = _built(config, architecture, sizes)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    assert main([f"--model-id={folder}", f"--output-dir={tmp_path}", "--embeddings", "--device-map=cpu"]) == 0

    weights = {n: p.numel() for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias")}
    expected = sum(count for n, count in weights.items() if not n.endswith(no_matrices))
    directory = ESDDirectory(tmp_path)
    lines = read_coverage(ModelPaths(directory, str(folder)).coverage)
    rows = read_table(directory.stats_file(str(folder)))
    analysed = [row for row in rows if not row["fit_status"].startswith("not analysed")]
    assert sum(int(row["params"]) for row in analysed) == expected
    assert len({row["longname"] for row in rows}) == len(rows)
    assert sum(line.params for line in lines if line.matrices and line.status != "skipped") == expected
    # In the file, each of the model's own parameters counts once, and no buffer but the biases of routers, which are
    # trained without an optimiser.
    routers = [buffer for n, buffer in model.named_buffers() if n.endswith("expert_bias")]
    assert totals(lines).params == sum(map(_count, [*model.parameters(), *routers]))
    for line in lines:
        assert line.reason is not None or line.status == "analysed"
        assert line.matrices == 0 or line.shape.count("x") > 0
    # In memory they are the same matrices, whatever they are called there.
    in_memory = [m for m in matrices(module_source(model), embeddings=True) if m.skip is None]
    assert sum(m.params for m in in_memory) == expected and len(in_memory) == len(analysed)


def _count(tensor: Any) -> int:
    return math.prod(tensor.shape)


def _built(config: str, architecture: str, sizes: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, architecture)(getattr(transformers, config)(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model
