"""A judge as far as it is needed before any GPU: its tokenizer, its limits, and what tells it from another model.

Reads weights only for their digest; loads no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import MissingModel, UsageError, naming_extras
from gpuherd.models.load.identity import files_digest
from gpuherd.models.load.options import LoadRequest, ModelOptions
from gpuherd.models.load.prepare import located, tokenizer_folder
from gpuherd.models.names import shown
from gpuherd.qa.judging.config import Chat

_EXTRAS = dict.fromkeys(("transformers", "tokenizers", "torch", "jinja2"), "qa")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """A model that will judge.

    Attributes:
        tokenizer: transformers' tokenizer.
        most_positions: the most tokens of form and reply together, None where the config does not say.
        end_ids: tokens that end a reply.
        chat: whether the form goes into the tokenizer's chat template.
        sha256: of its files, as ``files_digest``.
    """

    tokenizer: Any
    most_positions: int | None
    end_ids: tuple[int, ...]
    chat: bool
    sha256: str


def open_judge(model: str, options: ModelOptions, chat: Chat) -> JudgeModel:
    """The judge of this name, fetched if it is not here.

    Raises:
        MissingModel, BadModel: it, its adapter or its tokenizer is not to be had.
        UsageError: a chat template is asked for, and there is none.
        MissingExtra: transformers is not installed.
    """
    with naming_extras(_EXTRAS, "judging with a model takes"):
        from transformers import AutoTokenizer

        from gpuherd.lm.tokens import end_tokens_in
    asked = LoadRequest(
        model=model,
        adapter=options.adapter,
        merge_adapter=options.merge_adapter,
        trust_remote_code=options.trust_remote_code,
    )
    path, adapter = located(asked)
    folder = path if path.is_dir() else path.parent
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_folder(path, adapter), trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except Exception as problem:  # the library raises what it likes at a file that is damaged
        raise MissingModel(f"judge {shown(model)} has no tokenizer that transformers can use: {problem}") from None
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat == "yes" and not has_template:
        raise UsageError(f"judge {shown(model)} has no chat template; leave out --chat yes")
    return JudgeModel(
        tokenizer=tokenizer,
        most_positions=_most_positions(folder),
        end_ids=end_tokens_in(folder, tokenizer).ids,
        chat=has_template and chat != "no",
        sha256=files_digest(*([folder] if adapter is None else [folder, adapter])),
    )


def _most_positions(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config, Mapping) else None
    for values in (inner, config):
        for name in _POSITIONS:
            value = values.get(name) if isinstance(values, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
