"""Conversations as tokens: all that the assistant says is learnt, as the policy would say it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.qa.small_models import CHAT_TEMPLATE, WITHOUT_SYSTEM, make_tokenizer

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.chat import ChatTokenizer, ChatTokens
from gpuherd.posttrain.data.preference_rows import Conversation, imitated
from gpuherd.posttrain.rollout.sampler import Prompting

MARKED = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}<|end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{{ '\n' }}",
)
# A thought is opened before each answer and is not in the conversation, as of DeepSeek's.
OPENS_A_THOUGHT = CHAT_TEMPLATE.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>\n{% endif %}")
# Thoughts of earlier turns are dropped, the last turn always has one, and tools are known: as of Qwen's.
DROPS_THOUGHTS = (
    "{{ bos_token }}{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}{% for message in messages %}"
    "<|{{ message['role'] if message['role'] != 'tool' else 'user' }}|>\n"
    "{% set said = message['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if message['role'] == 'assistant' and loop.last %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ said }}{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_END = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRIMS = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'] | trim }}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Breaks of lines melt into one token, as they do for large vocabularies."""
    texts = ["a\n\n\nb\n\n\nc\n\nd\n\ne\nwhat is the capital of France? Paris."] * 20
    return make_tokenizer(tmp_path_factory.mktemp("chat"), texts, chat=CHAT_TEMPLATE)


def by(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def talk(*contents: str, first: int = 0, system: str | None = None) -> Conversation:
    """User and assistant by turns."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(contents)]
    before = [] if system is None else [{"role": "system", "content": system}]
    return Conversation((*before, *turns), first=first)


def learnt(tokenizer: Any, found: ChatTokens) -> list[str]:
    """The texts that are learnt."""
    pairs = zip(found.ids, found.learnt, strict=True)
    return [tokenizer.decode([token for token, _ in some]) for own, some in groupby(pairs, lambda each: each[1]) if own]


def begins(found: ChatTokens) -> list[tuple[int, ...]]:
    """All tokens before each text that is learnt."""
    starts = [n for n, own in enumerate(found.learnt) if own and not (n and found.learnt[n - 1])]
    return [found.ids[:start] for start in starts]


def test_all_turns_of_the_assistant_are_learnt_and_nothing_else(tokenizer: Any) -> None:
    conversation = talk("what?", "Paris.", "is it?", "It is.", system="Be brief.")
    by(tokenizer, CHAT_TEMPLATE)
    found = ChatTokenizer(tokenizer).tokens(conversation)
    assert learnt(tokenizer, found) == ["Paris.<|end|>", "It is.<|end|>"]
    whole = tokenizer.apply_chat_template(list(conversation.messages), tokenize=True, return_dict=True)["input_ids"]
    assert list(found.ids) == list(whole)[: len(found.ids)]
    assert tokenizer.decode(list(whole)[len(found.ids) :]) == "\n"  # what stands behind the last turn is nobody's
    prompts = Prompting(tokenizer, chat=True)
    assert begins(found) == [prompts.of_messages(conversation.messages[:place]) for place in (2, 4)]


def test_turns_before_the_answer_can_be_the_prompt(tokenizer: Any) -> None:
    by(tokenizer, CHAT_TEMPLATE)
    found = ChatTokenizer(tokenizer).tokens(talk("a", "b", "c", "d", first=3))
    assert learnt(tokenizer, found) == ["d<|end|>"]


@pytest.mark.parametrize("first", [0, 3])
def test_the_marks_of_a_template_say_the_same(tokenizer: Any, first: int) -> None:
    conversation = talk("what?", "Paris.", "is it?", "It is.", first=first, system="Be brief.")
    by_prefixes = ChatTokenizer(by(tokenizer, CHAT_TEMPLATE)).tokens(conversation)
    assert ChatTokenizer(by(tokenizer, MARKED)).tokens(conversation) == by_prefixes


def test_marks_that_are_not_of_every_turn_are_refused(tokenizer: Any) -> None:
    some = MARKED.replace("message['role'] == 'assistant' %}", "message['role'] == 'assistant' and loop.last %}")
    with pytest.raises(UsageError, match=r"marks 1 turns by \{% generation %\}, and the assistant has 2"):
        ChatTokenizer(by(tokenizer, some)).tokens(talk("a", "b", "c", "d"))


WORDS = st.sampled_from(["a", " ", "\n", "Paris", "<|end|>", "<|user|>", "</s>", "é", "<think>"])


def test_marks_without_the_end_are_refused(tokenizer: Any) -> None:
    endless = MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    with pytest.raises(UsageError, match=r"end token of turn 2 out of \{% generation %\}"):
        ChatTokenizer(by(tokenizer, endless)).tokens(talk("a", "b"))


TEXTS = st.lists(WORDS, max_size=6).map("".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), st.sampled_from([CHAT_TEMPLATE, TRIMS]))
def test_any_words_are_learnt_behind_what_the_policy_would_see(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], template: str
) -> None:
    """Control tokens that stand written out end nothing; breaks of lines at a border melt into nothing."""
    conversation = talk(*[text for pair in pairs for text in pair])
    found = ChatTokenizer(by(tokenizer, template)).tokens(conversation)
    said = learnt(tokenizer, found)
    assert len(said) == len(pairs)
    for text, (_, answer) in zip(said, pairs, strict=True):
        body = text.removesuffix("<|end|>")
        assert text.endswith("<|end|>") and "<|end|>" not in body
        assert body.replace(" ", "").strip("\n") == answer.replace(" ", "").strip("\n")
        assert template == TRIMS or "<think>" in body or "<think>" not in answer
    assert begins(found)[0] == Prompting(tokenizer, chat=True).of_messages(conversation.messages[:1])
    assert sum(token == tokenizer.convert_tokens_to_ids("<|end|>") for token in found.ids) == 2 * len(pairs)


def test_breaks_of_lines_at_a_border_are_tokenised_apart(tokenizer: Any) -> None:
    by(tokenizer, CHAT_TEMPLATE)
    conversation = talk("a", "\n\nb", "c", "\n\nd")
    found = ChatTokenizer(tokenizer).tokens(conversation)
    whole = tokenizer.apply_chat_template(list(conversation.messages), tokenize=True, return_dict=True)["input_ids"]
    assert list(found.ids) != list(whole)[: len(found.ids)]
    assert learnt(tokenizer, found) == ["\n\nb<|end|>", "\n\nd<|end|>"]
    prompts = Prompting(tokenizer, chat=True)
    assert begins(found)[0] == prompts.of_messages(conversation.messages[:1])


def test_a_system_turn_that_is_refused_stands_in_the_users(tokenizer: Any) -> None:
    conversation = talk("what?", "Paris.", system="Be brief.")
    by(tokenizer, WITHOUT_SYSTEM)
    found = ChatTokenizer(tokenizer).tokens(conversation)
    assert learnt(tokenizer, found) == ["Paris.<|end|>"]
    assert begins(found) == [Prompting(tokenizer, chat=True).of_messages(conversation.messages[:2])]


def test_a_thought_that_is_opened_for_the_policy_alone_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="turn 2 otherwise for an answer than in a conversation"):
        ChatTokenizer(by(tokenizer, OPENS_A_THOUGHT)).tokens(talk("a", "b"))


def test_thoughts_that_are_dropped_from_earlier_turns_are_not_learnt(tokenizer: Any) -> None:
    turns: list[Mapping[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "why"},
    ]
    by(tokenizer, DROPS_THOUGHTS)
    found = ChatTokenizer(tokenizer).tokens(Conversation(tuple(turns)))
    assert learnt(tokenizer, found) == ["b<|end|>", "<think>why</think>d<|end|>"]


def test_calls_are_learnt_and_results_are_not(tokenizer: Any) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Paris <|end|>"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "null": None}}}
    example = imitated(
        {
            "messages": [
                {"role": "user", "content": "Rain?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "no", "name": "weather"},
                {"role": "assistant", "content": "It is dry.", "reasoning_content": ""},
            ],
            "tools": [tool],
        }
    )
    assert isinstance(example, Conversation)
    by(tokenizer, DROPS_THOUGHTS)
    found = ChatTokenizer(tokenizer).tokens(example)
    first, second = learnt(tokenizer, found)
    assert first.startswith("<tool_call>") and first.endswith("</tool_call><|end|>")
    assert '{"city": "Paris < |end|>"}' in first.replace("\\u003c", "<").replace("\\u003e", ">")
    assert second == "<think></think>It is dry.<|end|>"
    prompt = tokenizer.decode(list(begins(found)[0]))
    assert '"parameters": {"type": "object"}' in prompt


def test_templates_that_can_not_teach_are_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="ends turn 2 by no end token"):
        ChatTokenizer(by(tokenizer, NO_END)).tokens(talk("a", "b"))
    shouts = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'] | upper }}")
    with pytest.raises(UsageError, match="does not write turn 2 as it is said"):
        ChatTokenizer(by(tokenizer, shouts)).tokens(talk("a", "b"))
    refuses = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"can't put this conversation: .*roles must alternate"):
        ChatTokenizer(by(tokenizer, refuses)).tokens(talk("a", "b"))
    with pytest.raises(UsageError, match="has no chat template"):
        ChatTokenizer(by(tokenizer, ""))


def user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def calling(function: dict[str, Any]) -> dict[str, Any]:
    return {**user("b", "assistant"), "tool_calls": [{"function": function}]}


def test_what_a_row_holds_is_seen_by_its_columns() -> None:
    pair = [user("q"), user("a", "assistant")]
    assert imitated({"prompt": "q", "completion": "a"}) == ("q", "a")
    assert imitated({"messages": pair}) == Conversation(tuple(pair))
    assert imitated({"prompt": pair[:1], "completion": pair[1:]}) == Conversation(tuple(pair), first=1)
    assert imitated({"prompt": pair[:1], "chosen": pair[1:], "rejected": [user("b", "assistant")]}) == Conversation(
        tuple(pair), first=1
    )
    assert imitated({"prompt": pair[:1], "answer": 7}) == Conversation((pair[0], user("7", "assistant")), first=1)
    tool = {"type": "function", "function": {"name": "f"}}
    for said in ([tool], '[{"type": "function", "function": {"name": "f"}}]'):
        assert imitated({"messages": pair, "tools": said}) == Conversation(tuple(pair), (tool,))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "its messages is neither a text nor a list of messages: it is empty"),
        ({"messages": "hello"}, "its messages is neither a text nor a list of messages"),
        ({"messages": [user("a"), 3]}, r"messages\[1\] is no mapping"),
        ({"messages": [user("a"), user("b", "bot")]}, r"messages\[1\].role is 'bot', none of system, developer, user"),
        ({"messages": [user("a"), {"content": "b"}]}, r"messages\[1\].role is missing"),
        ({"messages": [user(None), user("b", "assistant")]}, r"messages\[0\].content is missing"),
        ({"messages": [user([{"type": "image"}]), user("b", "assistant")]}, r"messages\[0\].content is a list"),
        ({"messages": [user("a"), user("b")]}, "no turn of the assistant behind another turn"),
        ({"messages": [user("b", "assistant")]}, "no turn of the assistant behind another turn"),
        ({"prompt": [user("a")], "completion": [user("b")]}, "no turn of the assistant behind another turn"),
        ({"messages": [user("a"), calling({})]}, r"messages\[1\].tool_calls\[0\].function.name is no text"),
        ({"messages": [user("a"), calling({"name": "f", "arguments": "x"})]},
         r"tool_calls\[0\].function.arguments is no mapping, and no JSON of one"),
        ({"messages": [{**calling({"name": "f"}), "role": "user"}]}, r"messages\[0\].tool_calls is no list"),
        ({"messages": [user("a"), user("b", "assistant")], "tools": ["f"]}, "its tools is no list of JSON schemas"),
        ({"messages": [user("a"), user("b", "assistant")], "tools": "{"}, "its tools is no JSON"),
        ({"chosen": [user("a"), calling({"name": "f"})], "rejected": [user("a"), user("c", "assistant")]},
         r"chosen\[1\].tool_calls: what is compared has role and content"),
    ],
)  # fmt: skip
def test_rows_that_are_none_are_refused_with_the_key(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        imitated(row)
