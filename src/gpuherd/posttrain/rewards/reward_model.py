"""Scores of a reward model: any classifier of sequences with one output, or with an output of a name (a sentiment).

The model reads texts as it was trained: through its chat template, as a pair of texts, or as one text. Batches are of
like lengths, halved where memory runs out and grown back. A score that is not finite stops the work, named.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, UsageError, naming_extras
from gpuherd.lm.forward import release
from gpuherd.lm.tokens import MARKER, turn_end
from gpuherd.models.checkpoints.hub import locate
from gpuherd.models.load.pretrained import check_code, config_of, runs_own_code
from gpuherd.models.names import parse_model, quoted
from gpuherd.posttrain.types import Problem, Reward
from gpuherd.qa.prompts.conversation import control_texts, defused, templated, token_ids
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

EXTRAS = {"torch": "posttrain", "transformers": "posttrain"}
FORM_FILE = "reward_model.json"  # beside a reward model that gpuherd trained: how texts are put to it
GROWS_AFTER = 16  # batches that fitted, before a larger one is tried again
_SHOWN = 60  # characters of a text in a message


class Form(StrEnum):
    """The form in which the model reads a prompt with its completion."""

    CHAT = "chat"  # a conversation of two turns, through the tokenizer's template
    PAIR = "pair"  # two texts with a separator between them, as encoders are trained
    JOINED = "joined"  # one text
    ENDED = "ended"  # one text, prompt and completion tokenised apart, with the end token behind: as rollouts are
    TURN = "turn"  # the same of conversations: the prompt by the template, the end of a turn behind the completion


class RewardModel:
    """A reward model in memory.

    Attributes:
        name: as the user named it.
        tokenizer, module: transformers'.
        form: how it reads texts.
        rows: the most rows that are read at once by now.
        cut: texts so far that were longer than the model's places, and lost their beginning.
    """

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str | None = None,
        *,
        label: str | None = None,
        form: Form | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ) -> None:
        """Loads it.

        Args:
            model: an id of the Hub or a folder.
            device: of torch.
            dtype: of its weights (float32, bfloat16, float16); None: the checkpoint's.
            label: of several outputs the one whose logit is the reward (``POSITIVE``).
            form: None: as ``reward_model.json`` says, else the chat template if it has one; else a pair for an encoder
                with one output, else one text.
            batch_size: the most rows that are read at once.

        Raises UsageError, MissingModel, BadModel (no such head: it would be made up at random), MissingExtra.
        """
        if batch_size < 1:
            raise UsageError(f"reward batch_size={batch_size}; the least is 1")
        with naming_extras(EXTRAS, "reward models are read with"):
            import torch
            import transformers
        self.name = model
        self.device = device
        self.rows = self._most_rows = batch_size
        self._fitted = 0  # batches, one after the other
        self.cut = 0
        folder = locate(parse_model(model), for_loading=True, with_code=trust_remote_code)
        raw = _json(folder / "config.json")
        check_code(model, raw, trusted=trust_remote_code)
        trusted = runs_own_code(raw, trusted=trust_remote_code)
        config = config_of(folder, trusted=trusted)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trusted, local_files_only=True
        )
        self.tokenizer.truncation_side = "left"  # the completion is what is judged
        self._controls = control_texts(self.tokenizer)
        self._turn_end = turn_end(self.tokenizer)
        self.output = _output(model, config, label)
        self.padding = _padding(model, self.tokenizer)
        config.get_text_config().pad_token_id = self.padding
        self.module, loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else getattr(torch, dtype),
            weights_only=True,
            output_loading_info=True,
            trust_remote_code=trusted,
            local_files_only=True,
        )
        missing = sorted([*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])])
        if missing:
            raise BadModel(
                f"{quoted(model)}: no reward model: its checkpoint has no {missing[0]}, which would be "
                "made up at random"
            )
        self.module = self.module.to(device).eval()
        self.form = form or _form(folder, self.tokenizer, config)
        self.most_tokens = _limit(self.tokenizer, config)

    def scores(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """The reward of each completion (without its end token) to the prompt at its place; finite.

        Raises BadModel, which names the completion whose score is not finite.
        """
        rows = [self.inputs(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        return self._read(rows, lambda row: f"completion {_quoted(completions[row])} to {_quoted(prompts[row])}")

    def scores_of_ids(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The same of token ids of its own tokenizer, prompt and completion in one row, end token included."""
        cut = [{"input_ids": self._cut(row)} for row in rows]
        return self._read(cut, lambda row: f"row {row + 1} of {len(rows)} ({len(rows[row])} tokens)")

    def inputs(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """A row as the model reads it: ``input_ids``, and ``token_type_ids`` where its tokenizer makes them."""
        tokenizer = self.tokenizer
        # What a policy writes can't end its answer, or begin another's turn, before the judge.
        completion = defused(completion, self._controls)
        if self.form is Form.TURN or (self.form is Form.CHAT and self._is_templated(prompt)):
            return {"input_ids": self._cut([*self._prompt_ids(prompt), *self._ended(completion, self._turn_end)])}
        prompt = defused(prompt, self._controls)
        if self.form is Form.ENDED:
            ids = [*tokenizer(prompt)["input_ids"], *self._ended(completion, tokenizer.eos_token_id)]
            return {"input_ids": self._cut(ids)}
        if self.form is Form.PAIR:
            made = tokenizer(prompt, completion)
            if self._too_long(made["input_ids"]):
                made = tokenizer(prompt, completion, truncation="longest_first", max_length=self.most_tokens)
        else:
            text = prompt + completion
            own = {"add_special_tokens": True}
            if self.form is Form.CHAT:
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
                text, own = self._rendered(turns), {"add_special_tokens": False}
            made = tokenizer(text, **own)
            if self._too_long(made["input_ids"]):
                made = tokenizer(text, **own, truncation=True, max_length=self.most_tokens)
        return {name: list(made[name]) for name in ("input_ids", "token_type_ids") if name in made}

    def _ended(self, completion: str, end: int | None) -> list[int]:
        ids = list(self.tokenizer(completion, add_special_tokens=False)["input_ids"])
        return ids if end is None else [*ids, end]

    def _is_templated(self, prompt: str) -> bool:
        """True for a prompt that is a rendered conversation already, and not the text of a user message."""
        before, _, behind = self._rendered([{"role": "user", "content": MARKER}], ask=True).partition(MARKER)
        return bool(before.strip() and behind.strip()) and prompt.startswith(before) and prompt.endswith(behind)

    def _prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """The tokens of a prompt up to the answer: by the template, which is not put round it twice."""
        if not self._is_templated(prompt):
            said = [{"role": "user", "content": defused(prompt, self._controls)}]
            prompt = self._rendered(said, ask=True)
        return token_ids(self.tokenizer, prompt, conversation=True)

    def _rendered(self, turns: list[dict[str, str]], *, ask: bool = False) -> str:
        try:
            if ask:
                return templated(self.tokenizer, turns)
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as problem:  # a template raises what it likes
            raise UsageError(
                f"{quoted(self.name)}: its chat template can't put a prompt and its completion: "
                f"{type(problem).__name__}: {problem}; choose another form (pair, joined)"
            ) from None

    def _too_long(self, ids: Sequence[int]) -> bool:
        """True, and counted, for a row that loses its beginning."""
        if self.most_tokens is None or len(ids) <= self.most_tokens:
            return False
        if not self.cut:
            logger.warning("%s: texts of more than %s tokens lose their beginning", quoted(self.name), self.most_tokens)
        self.cut += 1
        return True

    def _cut(self, ids: Sequence[int]) -> list[int]:
        return list(ids[-(self.most_tokens or 0) :] if self._too_long(ids) else ids)

    def _read(self, inputs: Sequence[dict[str, list[int]]], named: Callable[[int], str]) -> list[float]:
        """The scores of rows, longest first, as many at once as fit."""
        order = sorted(range(len(inputs)), key=lambda row: (-len(inputs[row]["input_ids"]), row))
        found: dict[int, float] = {}
        while len(found) < len(order):
            batch = order[len(found) : len(found) + self.rows]
            try:
                scores = self._pass([inputs[row] for row in batch])
            except (RuntimeError, MemoryError) as problem:
                if len(batch) == 1 or not is_out_of_memory(problem):
                    raise
                scores = []
            if not scores:  # outside the handler: a traceback keeps the failed batch's tensors alive
                self.rows, self._fitted = len(batch) // 2, 0
                release()
                logger.warning("%s: out of memory with %d rows; %d now", quoted(self.name), len(batch), self.rows)
                continue
            for row, score in zip(batch, scores, strict=True):
                if not math.isfinite(score):
                    raise BadModel(f"{quoted(self.name)}: the reward of {named(row)} is {score}, no finite number")
                found[row] = score
            self._fitted += 1
            if self._fitted == GROWS_AFTER:
                self.rows, self._fitted = min(self._most_rows, self.rows * 2), 0
        return [found[row] for row in range(len(inputs))]

    def _pass(self, rows: Sequence[dict[str, list[int]]]) -> list[float]:
        import torch

        longest = max(1, *(len(row["input_ids"]) for row in rows))

        def filled(values: Iterable[Sequence[int]], filling: int) -> torch.Tensor:
            # On the right: absolute positions count from the left.
            return torch.tensor([[*each, *[filling] * (longest - len(each))] for each in values], device=self.device)

        given = {
            name: filled((row[name] for row in rows), self.padding if name == "input_ids" else 0) for name in rows[0]
        }
        given["attention_mask"] = filled(([1] * len(row["input_ids"]) for row in rows), 0)
        with torch.inference_mode():
            logits = self.module(**given).logits
        scores: list[float] = logits[:, self.output].float().tolist()
        return scores


class ModelRewards:
    """Scores completions by a sequence classifier. Its rewards have no bounds, and no right and wrong."""

    verifiable = False
    reward_range = (-math.inf, math.inf)

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str | None = None,
        *,
        label: str | None = None,
        form: Form | None = None,
        batch_size: int = 32,
    ):
        """Loads nothing yet; the arguments are those of ``RewardModel``."""
        self.model = model
        self._load = partial(RewardModel, model, device, dtype, label=label, form=form, batch_size=batch_size)
        self._loaded: RewardModel | None = None

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The model's score of each completion to its prompt. Raises what loading raises, and BadModel for a score that
        is not finite."""
        if self._loaded is None:
            self._loaded = self._load()
        scores = self._loaded.scores([each.prompt for each in problems], completions)
        return [Reward(score) for score in scores]

    def close(self) -> None:
        """Lets the model go."""
        self._loaded = None


def _form(folder: Path, tokenizer: Any, config: Any) -> Form:
    """The form that the model's files name, or that its tokenizer suggests."""
    if (folder / FORM_FILE).is_file():
        said = _json(folder / FORM_FILE).get("form")
        if said not in list(Form):
            raise BadModel(f"{folder / FORM_FILE}: form {said!r} is none of {', '.join(Form)}")
        return Form(said)
    if getattr(tokenizer, "chat_template", None):
        return Form.CHAT
    makes_pairs = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
    return Form.PAIR if makes_pairs and config.num_labels == 1 else Form.JOINED


def _output(model: str, config: Any, label: str | None) -> int:
    """The index of the output that is the reward. Raises UsageError."""
    names = {int(place): str(name) for place, name in (config.id2label or {}).items()}
    if label is None:
        if config.num_labels == 1:
            return 0
        raise UsageError(
            f"{quoted(model)} has {config.num_labels} outputs ({', '.join(names.values())}); say which label's logit "
            "is the reward"
        )
    for place, name in names.items():
        if name.lower() == label.lower():
            return place
    raise UsageError(
        f"{quoted(model)} has no output {label!r}; it has {', '.join(names.values()) or config.num_labels}"
    )


def _padding(model: str, tokenizer: Any) -> int:
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise BadModel(f"{quoted(model)}: its tokenizer has neither a padding nor an end token, so no batch can be made")


def _limit(tokenizer: Any, config: Any) -> int | None:
    """The most tokens of a row; None where neither the model nor its tokenizer says."""
    places = getattr(config.get_text_config(), "max_position_embeddings", None)
    if config.model_type in ("roberta", "xlm-roberta", "camembert") and places:
        places -= 2  # their positions begin behind the padding's
    said = tokenizer.model_max_length
    limits = [int(each) for each in (places, said) if each and each < 1 << 30]
    return min(limits, default=None)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise BadModel(f"{path} can't be read: {problem}") from None
    return found if isinstance(found, dict) else {}


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
