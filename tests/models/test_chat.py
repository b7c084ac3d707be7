"""Tests of the chat template: ids are only appended, and equal Qwen's where the turns are in
canonical form."""

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.world import Observation, tool_of
from experiments.imitation.bpe import train_bpe
from models import chat, jinja
from models.tokenizer import Tokenizer
from rl.contexts import Opening
from rl.contexts.causal import Causal
from tests.models.helpers import extend, user
from tests.models.make_golden_chat import TOOL, rendered
from tests.models.test_tokenizer import TEXTS, template_ids, wild_text

OTHER_TOOL = tool_of("bell", "", {}, [])
NAMES = ("system", "user", "tool")


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_bpe([*TEXTS, jinja.QWEN25], 500, ('\n{"name": "',))


def of_roles(*roles: str):
    return st.fixed_dictionaries({"role": st.sampled_from(roles), "content": wild_text})


openings = st.lists(of_roles(*NAMES, "assistant"), min_size=1, max_size=3)
turns = st.lists(
    st.tuples(wild_text, st.booleans(), st.lists(of_roles(*NAMES), max_size=3)), max_size=4
)


def extended(small, context: Causal, text: str, closed: bool, answers, tools=None) -> list[int]:
    """Extend the conversation by a generation and its answers; return the ids of the generation."""
    generated = small.encode(text) + [small.im_end] * closed
    extend(context, generated, answers, tools)
    return generated


@given(openings, turns, st.sampled_from([None, [], [TOOL]]))
def test_every_turn_extends_the_one_before(small, opening, turns, again):
    """In random conversations, a prompt and its generation are a prefix of the next prompt, and
    every turn is framed.

    Passing the same tools `again` changes nothing.
    """
    context = Causal(Opening(small, Observation(opening, again or [])))
    blocks = context.prompt.count(small.im_start)
    for text, closed, answers in turns:
        held, before = context.prompt, list(context.prompt)
        generated = extended(small, context, text, closed, answers, again)
        assert context.prompt[: len(before) + len(generated)] == before + generated
        assert held == before  # a turn of the trajectory keeps this list
        pairs = itertools.pairwise(answer["role"] for answer in answers)
        blocks += len(answers) - sum(pair == ("tool", "tool") for pair in pairs) + 1
        assert context.prompt.count(small.im_start) == blocks
        assert context.prompt.count(small.im_end) == blocks - 1
        assert small.decode(context.prompt).endswith("<|im_start|>assistant\n")


@given(openings, turns, st.data())
def test_other_tools_rewrite_the_opening_and_nothing_after_it(small, opening, turns, data):
    """The tools are part of the system message, so after a change no earlier prompt is a prefix;
    the ids after the opening stay the same."""
    tools: list[chat.Tool] = []
    context = Causal(Opening(small, Observation(opening, tools)))
    for text, closed, answers in turns:
        since = context.prompt[len(chat.opening(small, opening, tools)) :]
        tools = data.draw(st.sampled_from([[], [TOOL], [TOOL, OTHER_TOOL]]))
        since += extended(small, context, text, closed, answers, tools)
        front = chat.opening(small, opening, tools)
        assert context.prompt[: len(front) + len(since)] == front + since


@given(openings, turns)
def test_hidden_tools_change_no_prompt(small, opening, turns):
    plain = Causal(Opening(small, Observation(opening)))
    hidden = Causal(Opening(small, Observation(opening, [TOOL]), show_tools=False))
    for turn in turns:
        extended(small, plain, *turn)
        extended(small, hidden, *turn, [OTHER_TOOL])
        assert plain.prompt == hidden.prompt


# No leading newline: the tokenizer of a whole conversation would merge it with the header.
cleaned = wild_text.map(lambda text: text.replace("<|", "").replace("\ud83d", "").strip() or "ok")
canonical = cleaned.filter(lambda text: "<|" not in text)
arguments = st.fixed_dictionaries({"to": canonical, "n": st.integers()})
function = st.fixed_dictionaries({"name": st.just("search"), "arguments": arguments})
call = st.fixed_dictionaries({"type": st.just("function"), "function": function})
assistant = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": canonical, "tool_calls": st.lists(call, max_size=2)}
)
message = st.fixed_dictionaries({"role": st.sampled_from(NAMES), "content": canonical})
conversation = st.lists(st.one_of(assistant, message), min_size=1, max_size=6)


@given(conversation, st.booleans())
def test_equals_the_template_we_ship(small, messages, with_tools):
    tools = [TOOL] if with_tools else []
    text = rendered(jinja.QWEN25, messages, tools)
    assert template_ids(small, text) == chat.opening(small, messages, tools)


@pytest.fixture(scope="module")
def qwens_own() -> tuple[Tokenizer, str]:
    if "QWEN_TOKENIZER_DIR" not in os.environ:
        pytest.skip("QWEN_TOKENIZER_DIR is not set to the directory of a Qwen2.5 tokenizer")
    folder = Path(os.environ["QWEN_TOKENIZER_DIR"])
    return Tokenizer.load(folder), (folder / "chat_template.jinja").read_text()


@given(conversation, st.booleans())
def test_equals_qwens_own_template(qwens_own, messages, with_tools):
    tokenizer, template = qwens_own
    tools = [TOOL] if with_tools else []
    text = rendered(template, messages, tools)
    assert text == rendered(jinja.QWEN25, messages, tools)
    assert template_ids(tokenizer, text) == chat.opening(tokenizer, messages, tools)


@given(st.lists(st.tuples(assistant, st.lists(message, max_size=2)), min_size=1, max_size=3))
def test_replies_and_observations_equal_one_opening(small, turns):
    """A conversation has the same ids built turn by turn, as a rollout, and at once, as a
    demonstration."""
    messages = [user("Go.")]
    ids = chat.opening(small, messages)
    for reply, answers in turns:
        ids += chat.reply(small, reply) + chat.observation(small, answers)[1:]
        messages += [reply, *answers]
    assert ids == chat.opening(small, messages)


@pytest.mark.parametrize(
    "message, complaint",
    [
        ({"role": "function", "content": "x"}, "unknown role 'function'"),
        ({"role": "user", "content": ["x"]}, "content of a user message must be text, not list"),
        ({"role": "tool"}, "content of a tool message must be text, not NoneType"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]},
            "JSON object, not str",
        ),
    ],
)
def test_bad_messages(small, message, complaint):
    with pytest.raises(chat.ChatError, match=complaint):
        chat.opening(small, [user("hi"), message])
