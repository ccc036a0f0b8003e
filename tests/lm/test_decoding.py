"""Decoding: the pitfalls of batched decoding with log-probs, one by one. Greedy answers are transformers' own."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.qa.small_models import INSTRUCTION, facts, plain_prompt, random_llama, random_model

from gpuherd.errors import BadModel, ExitCode, UsageError
from gpuherd.lm.backend import Decoded, Decoding, Finish, Generation, PromptTokens

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuherd.lm.model import LanguageModel  # noqa: E402

Load = Callable[..., Any]


def module_of(folder: Path, dtype: str = "float32") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def llama(trained: Path) -> LanguageModel:
    return LanguageModel(module_of(trained), tokenizer_of(trained))


@pytest.fixture(scope="module")
def small_gpt2(gpt2: Path) -> LanguageModel:
    return LanguageModel(module_of(gpt2), tokenizer_of(gpt2))


def prompts(tokenizer: Any, count: int) -> list[PromptTokens]:
    """Prompts of unlike lengths."""
    return [
        PromptTokens(f"q{number}", tuple(tokenizer(INSTRUCTION * (number % 3) + plain_prompt(question))["input_ids"]))
        for number, (question, _) in enumerate(facts()[:count])
    ]


def answers(decoded: Sequence[Decoded]) -> list[Generation]:
    return [each for one in decoded for each in (one.greedy, *one.samples) if each is not None]


def same(some: Sequence[Decoded], others: Sequence[Decoded], nats: float = 1e-5) -> None:
    """The same tokens, and log-probs within so much."""
    for one, other in zip(answers(some), answers(others), strict=True):
        assert (one.token_ids, one.end_id, one.text, one.ends) == (
            other.token_ids,
            other.end_id,
            other.text,
            other.ends,
        )
        assert one.log_probs == pytest.approx(other.log_probs, abs=nats)
        assert one.end_log_prob == pytest.approx(other.end_log_prob, abs=nats)


def slow(*values: Any) -> Any:
    """A case of a test that takes too long for every run."""
    return pytest.param(*values, marks=pytest.mark.slow)


HOW = Decoding(greedy=True, samples=2, max_new_tokens=12, end_ids=(1,), seed=4)


@pytest.mark.parametrize(
    ("model", "count"), [("llama", 12), ("small_gpt2", 12), *(slow(each, 32) for each in ("llama", "small_gpt2"))]
)
def test_batches_of_1_8_and_32_give_the_same_answers(model: str, count: int, request: pytest.FixtureRequest) -> None:
    lm: LanguageModel = request.getfixturevalue(model)
    asked = prompts(lm.tokenizer, count)
    alone = [lm.decode([each], HOW)[0] for each in asked]
    for rows in (8, 32):
        batches = [lm.decode(asked[start : start + rows], HOW) for start in range(0, count, rows)]
        same([each for batch in batches for each in batch], alone)


@pytest.mark.parametrize("model", ["llama", "small_gpt2"])
def test_greedy_answers_and_their_log_probs_are_those_of_transformers(
    model: str, request: pytest.FixtureRequest
) -> None:
    lm: LanguageModel = request.getfixturevalue(model)
    module = lm._model.module
    for prompt, decoded in zip(asked := prompts(lm.tokenizer, 6), lm.decode(asked, HOW), strict=True):
        ids = torch.tensor([prompt.token_ids])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=1,
            pad_token_id=2, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        theirs = out.sequences[0, ids.shape[1] :].tolist()
        log_probs = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(out.logits, theirs, strict=True)]
        ours = decoded.greedy
        assert ours is not None
        assert [*ours.token_ids, *([] if ours.end_id is None else [ours.end_id])] == theirs
        ended = [] if ours.end_log_prob is None else [ours.end_log_prob]
        assert [*ours.log_probs, *ended] == pytest.approx(log_probs, abs=1e-5)


@pytest.mark.parametrize("model", ["llama", "small_gpt2"])
def test_recorded_log_probs_are_the_raw_models_whatever_the_draws_are_of(
    model: str, request: pytest.FixtureRequest
) -> None:
    lm: LanguageModel = request.getfixturevalue(model)
    how = Decoding(greedy=False, samples=3, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=10, seed=1)
    asked = prompts(lm.tokenizer, 6)
    for number in range(3):
        drawn = [each.samples[number] for each in lm.decode(asked, how)]
        forced = lm.log_probs(asked, [each.token_ids for each in drawn])
        for each, log_probs in zip(drawn, forced, strict=True):
            assert len(each.token_ids) == 10
            assert each.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_samples_are_drawn_from_the_distribution_of_answers(llama: LanguageModel) -> None:
    """The first token of 4,000 answers to one question, against the model's own probabilities."""
    from scipy.stats import chisquare

    prompt = PromptTokens("one", tuple(llama.tokenizer(plain_prompt("What is the capital of Mexico?"))["input_ids"]))
    log_probs = torch.tensor(llama.weigh([prompt], [(token,) for token in range(512)])[0], dtype=torch.float64)
    decoded = llama.decode([prompt], Decoding(greedy=False, samples=4000, max_new_tokens=1))[0]
    counts = torch.tensor([each.token_ids[0] for each in decoded.samples]).bincount(minlength=512).double()
    expected = log_probs.exp() * 4000
    often = expected >= 5
    assert often.sum() >= 4
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    assert chisquare(found.numpy(), wanted.numpy(), sum_check=False).pvalue > 1e-4


def test_an_answer_depends_on_no_other_answer(llama: LanguageModel) -> None:
    asked = prompts(llama.tokenizer, 6)
    many = llama.decode(asked, Decoding(greedy=True, samples=5, max_new_tokens=8, end_ids=(1,), seed=9))
    few = llama.decode(asked[::-1][:3], Decoding(greedy=False, samples=2, max_new_tokens=8, end_ids=(1,), seed=9))
    for ours, theirs in zip(few[::-1], many[3:], strict=True):
        assert [each.token_ids for each in ours.samples] == [each.token_ids for each in theirs.samples[:2]]
    other = llama.decode(asked, Decoding(greedy=False, samples=5, max_new_tokens=8, end_ids=(1,), seed=10))
    assert [each.text for each in answers(other)] != [each.text for one in many for each in one.samples]


def test_nothing_is_inherited_from_a_generation_config(trained: Path) -> None:
    module = module_of(trained)
    asked = prompts(tokenizer_of(trained), 4)
    plain = LanguageModel(module, tokenizer_of(trained)).decode(asked, HOW)
    module.generation_config.update(
        do_sample=True, temperature=3.0, top_k=2, repetition_penalty=5.0, min_new_tokens=9, suppress_tokens=[327],
        max_new_tokens=2, eos_token_id=5,
    )  # fmt: skip
    assert LanguageModel(module, tokenizer_of(trained)).decode(asked, HOW) == plain


def test_the_pad_token_plays_no_part(trained: Path) -> None:
    tokenizer, without = tokenizer_of(trained), tokenizer_of(trained)
    tokenizer.pad_token = tokenizer.eos_token
    without.pad_token = None
    asked = prompts(tokenizer, 8)
    module = module_of(trained)
    assert LanguageModel(module, tokenizer).decode(asked, HOW) == LanguageModel(module, without).decode(asked, HOW)


def test_an_answer_ends_at_the_first_of_several_end_tokens(llama: LanguageModel) -> None:
    asked = prompts(llama.tokenizer, 8)
    free = llama.decode(asked, Decoding(max_new_tokens=12))
    third = {each.token_ids[2] for each in answers(free)}
    ended = llama.decode(asked, Decoding(max_new_tokens=12, end_ids=(1, *third)))
    for one, whole in zip(answers(ended), answers(free), strict=True):
        place = next(place for place, token in enumerate(whole.token_ids) if token in (1, *third))
        assert one.end_id == whole.token_ids[place]
        assert one.token_ids == whole.token_ids[:place]
        assert one.log_probs == pytest.approx(whole.log_probs[:place], abs=1e-5)
        assert one.end_log_prob == pytest.approx(whole.log_probs[place], abs=1e-5)
        assert one.finish is Finish.EOS


def test_the_end_token_counts_among_the_new_ones(llama: LanguageModel) -> None:
    asked = prompts(llama.tokenizer, 4)
    lengths = [
        len(each.token_ids) + 1 for each in answers(llama.decode(asked, Decoding(max_new_tokens=12, end_ids=(1,))))
    ]
    for prompt, length in zip(asked, lengths, strict=True):
        just = llama.decode([prompt], Decoding(max_new_tokens=length, end_ids=(1,)))[0].greedy
        short = llama.decode([prompt], Decoding(max_new_tokens=length - 1, end_ids=(1,)))[0].greedy
        assert just is not None
        assert short is not None
        assert just.end_id == 1
        assert short.end_id is None
        assert short.token_ids == just.token_ids


def test_half_precision_logits_are_taken_to_float32_first(trained: Path) -> None:
    module = module_of(trained, "bfloat16")
    lm = LanguageModel(module, tokenizer_of(trained), exact=True)
    prompt = prompts(lm.tokenizer, 1)[0]
    with torch.inference_mode():
        logits = module(torch.tensor([prompt.token_ids])).logits[0, -1]
    first = answers(lm.decode([prompt], Decoding(max_new_tokens=1)))[0].log_probs[0]
    assert first == pytest.approx(float(logits.double().log_softmax(-1).max()), abs=1e-6)
    assert first != pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-6)


def test_answers_are_never_made_from_their_text_again(small_gpt2: LanguageModel) -> None:
    asked = prompts(small_gpt2.tokenizer, 8)
    decoded = answers(small_gpt2.decode(asked, Decoding(max_new_tokens=16)))
    again = [small_gpt2.tokenizer(each.text, add_special_tokens=False)["input_ids"] for each in decoded]
    assert any(list(each.token_ids) != ids for each, ids in zip(decoded, again, strict=True))
    for each, log_probs in zip(decoded, small_gpt2.log_probs(asked, [one.token_ids for one in decoded]), strict=True):
        assert each.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_the_model_reads_the_ids_as_they_are(trained: Path) -> None:
    module = module_of(trained)
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda _module, _args, words: seen.append(words), with_kwargs=True)
    twice = PromptTokens("bos", (0, 0, 46, 79))
    LanguageModel(module, tokenizer_of(trained)).decode(
        [twice, PromptTokens("short", (0, 46))], Decoding(max_new_tokens=1)
    )
    assert seen[0]["input_ids"].tolist() == [[0, 0, 46, 79], [0, 0, 0, 46]]
    assert seen[0]["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert seen[0]["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert seen[0]["logits_to_keep"] == 1


@pytest.mark.parametrize("stop", [("\n\n",), ("Question", "an")])
def test_stop_strings_end_an_answer_before_them(llama: LanguageModel, stop: tuple[str, ...]) -> None:
    asked = prompts(llama.tokenizer, 16)
    free = answers(llama.decode(asked, Decoding(max_new_tokens=16, end_ids=(1,), seed=2, samples=2, temperature=2.0)))
    stopped = answers(
        llama.decode(asked, Decoding(max_new_tokens=16, end_ids=(1,), seed=2, samples=2, temperature=2.0, stop=stop))
    )
    assert any(each.finish is Finish.STOP for each in stopped) or stop == ("\n\n",)
    for one, whole in zip(stopped, free, strict=True):
        places = [place for each in stop if (place := whole.text.find(each)) >= 0]
        assert (one.finish is Finish.STOP) is bool(places)
        assert one.text == whole.text[: min(places, default=len(whole.text))]
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
        assert one.log_probs == pytest.approx(whole.log_probs[: len(one.token_ids)], abs=1e-5)
        assert (one.ends or (0,))[-1] == len(one.text)
        if one.finish is Finish.STOP:
            assert one.end_id is None
            assert one.end_log_prob is None


def test_prompts_that_begin_alike_are_read_once(trained: Path) -> None:
    module, tokenizer = module_of(trained), tokenizer_of(trained)
    read: list[int] = []
    module.register_forward_pre_hook(
        lambda _module, _args, words: read.append(words["input_ids"].numel()), with_kwargs=True
    )
    begin = INSTRUCTION * 4
    asked = [
        PromptTokens(question, tuple(tokenizer(begin + plain_prompt(question))["input_ids"]))
        for question, _ in facts()[:8]
    ]
    shared = LanguageModel(module, tokenizer).decode(asked, HOW)
    together, read[:] = list(read), []
    alone = LanguageModel(module, tokenizer, exact=True).decode(asked, HOW)
    same(shared, alone)
    first = [size for size in read if size > 30]
    assert len(first) == 8
    assert together[0] + together[1] < sum(first) / 2


def test_exact_answers_are_equal_to_the_bit_whatever_is_asked_beside(trained: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        lm = LanguageModel(module_of(trained, dtype), tokenizer_of(trained), exact=True)
        asked = prompts(lm.tokenizer, 6)
        assert lm.decode(asked, HOW) == [lm.decode([each], HOW)[0] for each in asked]


def test_answers_end_where_the_models_positions_end(tmp_path: Path) -> None:
    random_llama(tmp_path, max_position_embeddings=24)
    lm = LanguageModel(module_of(tmp_path), tokenizer_of(tmp_path))
    assert lm.most_positions == 24
    long, short = PromptTokens("long", tuple(range(10, 30))), PromptTokens("short", (10, 11))
    decoded = lm.decode([long, short], Decoding(max_new_tokens=10))
    assert [len(each.token_ids) for each in answers(decoded)] == [4, 10]
    with pytest.raises(UsageError, match="prompt full: 24 tokens, and the model has 24 places"):
        lm.decode([short, PromptTokens("full", tuple(range(10, 34)))], Decoding())
    with pytest.raises(UsageError, match="prompt none: it is empty"):
        lm.decode([PromptTokens("none", ())], Decoding())


def test_rows_that_ended_never_pass_learnt_positions(tmp_path: Path) -> None:
    """A long prompt's answer ends; the batch goes on with a short one's for more steps than the long one has places."""
    random_model(tmp_path, "gpt2", vocab_size=512, n_embd=32, n_layer=1, n_head=2, n_positions=40)
    lm = LanguageModel(module_of(tmp_path), None)
    lm.tokenizer = type("Words", (), {"decode": lambda self, ids, **how: "".join(f" {each}" for each in ids)})()
    long, *others = [PromptTokens(str(length), tuple(range(10, 10 + length))) for length in (36, 5, 6, 7, 8)]
    decoded = lm.decode([long, *others], Decoding(max_new_tokens=30))
    assert [len(each.token_ids) for each in answers(decoded)] == [4, 30, 30, 30, 30]
    same(decoded, [lm.decode([each], Decoding(max_new_tokens=30))[0] for each in (long, *others)])


def test_logits_that_are_no_distribution_end_that_answer_alone(trained: Path) -> None:
    module = module_of(trained)
    lm = LanguageModel(module, tokenizer_of(trained))
    asked = prompts(lm.tokenizer, 3)
    plain = lm.decode(asked, Decoding(max_new_tokens=6))
    steps: list[int] = []

    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            output.logits[1, -1, 40] = float("nan")
        return output

    hook = module.register_forward_hook(spoil)
    spoilt = lm.decode(asked, Decoding(max_new_tokens=6))
    hook.remove()
    same([spoilt[0], spoilt[2]], [plain[0], plain[2]])
    broken, whole = spoilt[1].greedy, plain[1].greedy
    assert broken is not None
    assert whole is not None
    assert broken.token_ids[:2] == whole.token_ids[:2]
    assert len(broken.token_ids) == 3
    assert broken.log_probs[2] is None
    assert None not in broken.log_probs[:2]
    assert broken.end_id is None


def test_of_the_logits_of_a_step_nothing_lives_longer_than_to_the_next(tmp_path: Path) -> None:
    """4 bytes a token are kept (``Row.log_probs``); ``benchmarks/_decode_memory.py`` measures the whole process."""
    random_model(tmp_path, "gpt2", vocab_size=5000, n_embd=32, n_layer=1, n_head=2, n_positions=128)
    module = module_of(tmp_path)
    alive: list[Any] = []
    most = 0

    def count(_module: Any, _args: Any, output: Any) -> None:
        nonlocal most
        alive.append(weakref.ref(output))
        most = max(most, sum(each() is not None for each in alive))

    module.lm_head.register_forward_hook(count)
    lm = LanguageModel(module, type("Words", (), {"decode": lambda self, ids, **how: " x" * len(ids)})())
    lm.decode([PromptTokens("a", (5, 6)), PromptTokens("b", (7,))], Decoding(samples=3, max_new_tokens=60))
    assert len(alive) == 60
    assert most <= 2


def full_above(
    module: Any, rows: int, words: str = "[enforce fail] DefaultCPUAllocator: can't allocate memory"
) -> list[int]:
    """The allocator's part is played: a forward of more rows than this finds no memory. Returns the rows of each."""
    asked: list[int] = []

    def refuse(_module: Any, _args: Any, values: Any) -> None:
        asked.append(len(values["input_ids"]))
        if asked[-1] > rows:
            raise RuntimeError(words)

    module.register_forward_pre_hook(refuse, with_kwargs=True)
    return asked


def test_a_batch_that_finds_no_memory_is_halved_and_the_size_remembered(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, tokenizer = module_of(trained), tokenizer_of(trained)
    asked = prompts(tokenizer, 8)
    whole = LanguageModel(module, tokenizer).decode(asked, HOW)
    tried = full_above(module, 7)
    lm = LanguageModel(module, tokenizer)
    with caplog.at_level(logging.WARNING):
        same(lm.decode(asked, HOW), whole)
    assert lm.most_rows == 6
    assert "out of memory with 24 rows; going on with 12" in caplog.text
    tried.clear()
    same(lm.decode(asked, HOW), whole)
    assert max(tried) <= 7


def test_many_answers_to_one_prompt_are_halved_too(trained: Path) -> None:
    module, tokenizer = module_of(trained), tokenizer_of(trained)
    how = Decoding(greedy=True, samples=5, max_new_tokens=4, end_ids=(1,), seed=3)
    asked = prompts(tokenizer, 2)
    whole = LanguageModel(module, tokenizer).decode(asked, how)
    tried = full_above(module, 3)
    lm = LanguageModel(module, tokenizer)
    same(lm.decode(asked, how), whole)
    assert lm.most_rows == 3
    tried.clear()
    same(lm.decode(asked, how), whole)
    assert max(tried) == 3


def test_one_answer_that_finds_no_memory_is_the_end(trained: Path) -> None:
    module = module_of(trained)
    full_above(module, 0, "CUDA out of memory. Tried to allocate")
    lm = LanguageModel(module, tokenizer_of(trained))
    with pytest.raises(RuntimeError, match="out of memory"):
        lm.decode(prompts(lm.tokenizer, 2), HOW)


def test_other_errors_are_not_tried_again(trained: Path) -> None:
    module = module_of(trained)
    tried = full_above(module, 0, "shapes differ")
    lm = LanguageModel(module, tokenizer_of(trained))
    with pytest.raises(RuntimeError, match="shapes differ"):
        lm.decode(prompts(lm.tokenizer, 4), HOW)
    assert len(tried) == 1


def test_a_model_with_an_encoder_is_refused_by_name() -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model("t5", d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=64)
    with pytest.raises(BadModel, match="T5ForConditionalGeneration has an encoder and a decoder") as caught:
        LanguageModel(AutoModelForSeq2SeqLM.from_config(config), None)
    assert caught.value.exit_code is ExitCode.BAD_INPUT
