"""What transformers' config classes have for each family, in the form of ``family_defaults.json``.

``python tests/models/describe/family_defaults.py`` writes that file anew, after a new family or a new transformers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("formulas") / "family_defaults.json"

# Fields that no shape and no cache depends on.
_WITHOUT_SIZE = re.compile(
    r"_?(.*token.*id.*|.*_token_index|.*dropout.*|.*pdrop|.*_eps.*|.*epsilon.*|init.*|.*_act|.*activation.*|.*_std|.*coef.*|"
    r".*layerdrop|use_cache|output_.*|return_dict|pretraining_tp|(?!qk_rope_head_dim|no_rope_layer_interval).*rope.*|.*_scal.*|.*temperature.*|problem_type|"
    r"chunk_size_feed_forward|summary.*|.*multiplier.*|.*capping.*|.*soft_cap|dtype|transformers_version|.*_loss.*|"
    r"is_.*|norm_topk_prob|use_mamba.*|.*time_step_m.*|query_pre_attn.*|scale_.*|slow_but.*|apply_residual.*|reorder_.*|"
    r"use_parallel_residual|alibi|rotary_pct|.*theta|use_associative.*|residual_in.*|rescale_.*|mm_tokens.*|"
    r"z_loss.*|floor_scale|attn_.*scale|attn_temperature.*|routed_scaling.*|topk_.*|n_group|logit.*|attention_softmax.*|"
    r"num_logits.*|swiglu.*|router_.*|clip_qkv|pretrain.*|use_bidirectional.*|.*chunk_size$|no_rope_layers|relative_attention_max.*|"
    r"mamba_norm_before.*|w_init.*|forced_.*|classifier.*|.*_name_or_path|bos|eos|model_type|architectures|id2label|"
    r"label2id|qk_head_dim|final_w.*|interleave_rope)"
)
_KEPT_ANYWAY = {"attention_chunk_size"}
_WORDS = {"feed_forward_proj", "time_step_rank", "mamba_dt_rank"}


def defaults_of(model_type: str) -> dict[str, Any]:
    """The entry of one family."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    defaults = {}
    for name in kind.__dataclass_fields__:
        if _WITHOUT_SIZE.fullmatch(name) and name not in _KEPT_ANYWAY:
            continue
        value = getattr(kind, name, None)
        if value is None or value is False or not isinstance(value, (int, str) if name in _WORDS else int):
            continue
        defaults[name] = value
    lists = {"recurrent_gemma": ("block_types",), "gpt_neo": ("attention_types",)}
    for name in lists.get(model_type, ()):
        defaults[name] = json.loads(json.dumps(getattr(kind(), name)))
    names = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    )
    order: tuple[int, ...] = (
        (1, 2, 0, 3) if model_type in _SEQ_TO_SEQ or "text_config" in kind.sub_configs else (0, 1, 2, 3)
    )
    order = (3,) if model_type in _ENCODERS else order
    class_name = next((names[i][model_type] for i in order if model_type in names[i]), None)
    return {
        "class_name": class_name,
        "split": _split(kind, class_name),
        "aliases": {key: value for key, value in kind.attribute_map.items() if not _WITHOUT_SIZE.fullmatch(key)},
        "defaults": defaults,
    }


def _split(kind: Any, class_name: str | None) -> dict[str, str]:
    """Modules of a layer that tensor parallelism splits, and how; ``head`` for the head."""
    import transformers

    plan = getattr(kind, "base_model_tp_plan", None) or {}
    found = {
        name.removeprefix("layers.*."): style
        for name, style in plan.items()
        if name.startswith("layers.*.") and style.removeprefix("packed_").startswith(("colwise", "rowwise"))
    }
    head = getattr(getattr(transformers, class_name or "", None), "_tp_plan", None) or {}
    return found | ({"head": head["lm_head"]} if found and "lm_head" in head else {})


_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "distilbert"})
_SEQ_TO_SEQ = frozenset(
    {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "m2m_100"}
)


def main() -> None:
    """Writes the file for all families that ``families`` knows."""
    from tests.models.describe.formulas.from_config import FAMILIES
    from tests.models.describe.formulas.wrapped import PARTS

    entries = {name: defaults_of(name) for name in sorted({*FAMILIES, *PARTS})}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in entries.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", "utf-8")


if __name__ == "__main__":
    main()
