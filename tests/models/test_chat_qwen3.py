"""Tests of Qwen3's chat template: our ids equal what `transformers` renders, and its thinking
switch."""

import functools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.world import Observation
from experiments.imitation.bpe import train_bpe
from models import chat, hf, jinja, qwen
from models.tokenizer import Tokenizer, TokenizerError
from rl.contexts import Opening
from rl.contexts.causal import Causal
from rl.contexts.reasoning import ReasoningAugmented
from rl.engines.serve.requests import ChatRequest, Refused, fields_of, parse
from tests.models.helpers import edit, extend, tool, user
from tests.models.make_golden_chat import FILE, TOOL, rendered, template_of
from tests.models.test_chat import assistant, canonical, message
from tests.models.test_tokenizer import TEXTS, template_ids

SWITCHED = jinja.QWEN3


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    plain = train_bpe([*TEXTS, jinja.QWEN3], 500, ("<think>", "</think>"))
    return Tokenizer(plain._original.to_str(), template=SWITCHED)


CASES = [json.loads(line) for line in FILE.read_text().splitlines()]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c['name']}-{len(c['tools'])}-{c['thinking']}"
)
def test_equals_what_transformers_rendered(small, case):
    tokenizer = small.with_thinking(case["thinking"])
    ids = chat.opening(tokenizer, case["messages"], case["tools"])
    assert tokenizer.decode(ids) == case["text"]
    assert ids == template_ids(tokenizer, case["text"])


@pytest.fixture(scope="module")
def qwens_own() -> str:
    """Qwen3's own template: of a tokenizer, or our copy."""
    place = os.environ.get("QWEN3_TOKENIZER_DIR")
    return template_of(Path(place)) if place else SWITCHED


thoughts = st.builds(
    lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}", canonical, canonical
)
turn = st.builds(lambda text: {"role": "assistant", "content": text}, thoughts)
thoughtful = st.lists(st.one_of(turn, assistant, message), min_size=1, max_size=6)


@settings(max_examples=25)
@given(thoughtful, st.booleans(), st.booleans())
def test_equals_qwens_own_template(small, qwens_own, messages, with_tools, thinking):
    tokenizer, tools = small.with_thinking(thinking), [TOOL] if with_tools else []
    text = rendered(qwens_own, messages, tools, thinking)
    assert template_ids(tokenizer, text) == chat.opening(tokenizer, messages, tools)


def extended(context, text: str, answers) -> None:
    extend(context, [*context.tokenizer.encode(text), context.tokenizer.im_end], answers)


forgetful = functools.partial(ReasoningAugmented, hint=False)


@pytest.mark.parametrize("template, answered", [(Causal, tool), (forgetful, user)])
@settings(max_examples=20)
@given(turns=st.lists(st.tuples(thoughts, canonical), min_size=1, max_size=3))
def test_an_episode_is_the_conversation_that_qwen_renders(small, template, answered, turns):
    """Thoughts since the question stay, so every prompt extends the last one, in Qwen3's template
    as here. A template that forgets them is Qwen's where answers are questions."""
    messages = [user("Go.")]
    context = template(Opening(small, Observation(messages)))
    for text, answer in turns:
        answers = [answered(answer)]
        extended(context, text, answers)
        messages = [*messages, {"role": "assistant", "content": text}, *answers]
        assert context.prompt == chat.opening(small, messages)


def test_without_thinking_every_turn_begins_with_an_empty_thought(small):
    off = small.with_thinking(False)
    context = Causal(Opening(off, Observation([user("Go.")])))
    before = list(context.prompt)
    extended(context, "ok", [tool("3")])
    assert context.prompt[: len(before)] == before
    assert off.decode(context.prompt).count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2


def test_the_world_is_not_given_thoughts(small):
    context = Causal(Opening(small, Observation([user("Go.")])))
    assert context.action("<think>\nHm\n</think>\n\nsearch") == "search"
    assert context.action("search") == "search" and context.action("<think>\nHm") == ""
    plain = Causal(Opening(Tokenizer(small._original.to_str()), Observation([user("Go.")])))
    assert plain.action("<think>\nHm\n</think>\n\nsearch").startswith("<think>")


def test_a_demonstrated_turn_has_a_thought_or_an_empty_one(small):
    off, thought = small.with_thinking(False), {"reasoning_content": "Hm"}
    for tokenizer, more, text in (
        (small, thought, "<think>\nHm\n</think>\n\nok<|im_end|>"),
        (small, {}, "<think>\n\n</think>\n\nok<|im_end|>"),
        (off, {}, "ok<|im_end|>"),
    ):
        assert tokenizer.decode(chat.reply(tokenizer, {"content": "ok"} | more)) == text


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("where", ["file", "tokenizer_config"])
def test_a_checkpoint_keeps_its_template_and_the_switch_it_was_trained_with(
    small, tmp_path, thinking, where
):
    """Also for `transformers`, whose default is what the policy was trained with."""
    source, again = tmp_path / "source", tmp_path / "again"
    shape = qwen.Config(small.vocab_size, 16, 1, 2, 1, 8, 16, qkv_bias=False, qk_norm=True)
    hf.save(source, shape, qwen.init(shape, 0), tokenizer=small)
    if where == "tokenizer_config":
        (source / "chat_template.jinja").unlink()
        edit(source / "tokenizer_config.json", {"chat_template": SWITCHED})
    loaded = Tokenizer.load(source)
    assert loaded.thinking is True
    for _ in range(2):  # saved once more, nothing is added once more
        loaded.with_thinking(thinking).save(again)
        loaded = Tokenizer.load(again)
        assert loaded.thinking is thinking
    text = (again / "chat_template.jinja").read_text()
    assert text.endswith(SWITCHED) and text.count("set enable_thinking") == (not thinking)
    question = [user("Hi")]
    off = rendered(SWITCHED, question, [], False)
    assert (rendered(text, question, [], None) == off) == (not thinking)
    assert rendered(text, question, [], False) == off
    assert rendered(text, question, [], True) != off


def test_a_server_takes_the_switch_of_a_request(small):
    body = {"messages": [user("Hi")]}
    off = small.with_thinking(False)

    def ask(**options):
        text = json.dumps(body | {"chat_template_kwargs": options}).encode()
        return parse(ChatRequest, fields_of(text, "policy"))

    assert list(ask().prompts(small)) == [chat.opening(small, body["messages"])]
    assert list(ask(enable_thinking=False).prompts(small)) == [chat.opening(off, body["messages"])]
    for options in ({"enable_thinking": 1}, {"thinking": False}):
        with pytest.raises(Refused, match="chat_template_kwargs"):
            ask(**options)


def test_other_templates_have_no_switch():
    plain = train_bpe(TEXTS, 340)
    assert plain.thinking is None
    with pytest.raises(TokenizerError, match="no thinking switch"):
        plain.with_thinking(False)
