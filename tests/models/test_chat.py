"""The chat template: only ever appended to, and equal to Qwen's where the turns are in canonical form."""

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import chat, template
from models.tokenizer import Tokenizer, train_bpe
from tests.models.test_tokenizer import TEXTS, wild_text

TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "find “flights”", "parameters": {"type": "object"}},
}
NAMES = ("system", "user", "tool")


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_bpe([*TEXTS, template.TOOLS_BEFORE, template.TOOLS_AFTER], 500, ('\n{"name": "',))


def of_roles(*roles: str):
    return st.fixed_dictionaries({"role": st.sampled_from(roles), "content": wild_text})


turns = st.lists(st.tuples(wild_text, st.booleans(), st.lists(of_roles(*NAMES), max_size=3)), max_size=4)


@given(st.lists(of_roles(*NAMES, "assistant"), max_size=3), turns, st.booleans())
def test_every_turn_extends_the_one_before(small, opening, turns, with_tools):
    """Random conversations: the loop's own rendering grows, keeps the sampled ids, and frames every turn."""
    ids = chat.opening(small, opening, [TOOL] if with_tools else [])
    blocks = ids.count(small.im_start)
    for text, closed, answers in turns:
        generated = small.encode(text) + [small.im_end] * closed
        longer = [*ids, *generated, *chat.observation(small, answers, closed=closed)]
        assert longer[: len(ids)] == ids  # so `longer` is a prefix of what comes after it
        tools_in_a_row = sum(a["role"] == b["role"] == "tool" for a, b in itertools.pairwise(answers))
        blocks += len(answers) - tools_in_a_row + 1
        assert longer.count(small.im_start) == blocks == longer.count(small.im_end) + 1
        assert small.decode(longer).endswith("<|im_start|>assistant\n")
        ids = longer


# No newline in leading whitespace: there a whole conversation's tokenizer would merge the header into the content.
canonical = wild_text.map(lambda text: text.strip() or "ok").filter(
    lambda text: "<|" not in text and "\ud83d" not in text
)
calls = st.lists(st.fixed_dictionaries({"to": canonical, "n": st.integers()}), max_size=2).map(
    lambda many: [{"type": "function", "function": {"name": "search", "arguments": a}} for a in many]
)
assistant = st.builds(lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, canonical, calls)
message = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(NAMES), canonical)
conversation = st.lists(st.one_of(assistant, message), min_size=1, max_size=6)


def rendered(template: str, messages, tools) -> str:
    """What `transformers` makes of a template."""
    jinja2 = pytest.importorskip("jinja2")
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    assert jinja2
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = chat._json
    return environment.from_string(template).render(messages=messages, tools=tools, add_generation_prompt=True)


@given(conversation, st.booleans())
def test_equals_the_template_we_ship(small, messages, with_tools):
    tools = [TOOL] if with_tools else []
    assert small.encode_template(rendered(template.JINJA, messages, tools)) == chat.opening(small, messages, tools)


@pytest.fixture(scope="module")
def qwens_own() -> tuple[Tokenizer, str]:
    if "QWEN_TOKENIZER_DIR" not in os.environ:
        pytest.skip("QWEN_TOKENIZER_DIR names no Qwen2.5 tokenizer")
    folder = Path(os.environ["QWEN_TOKENIZER_DIR"])
    return Tokenizer.load(folder), (folder / "chat_template.jinja").read_text()


@given(conversation, st.booleans())
def test_equals_qwens_own_template(qwens_own, messages, with_tools):
    tokenizer, template = qwens_own
    tools = [TOOL] if with_tools else []
    text = rendered(template, messages, tools)
    assert text == rendered(template.JINJA, messages, tools)
    assert tokenizer.encode_template(text) == chat.opening(tokenizer, messages, tools)


@given(st.lists(st.tuples(assistant, st.lists(message, max_size=2)), min_size=1, max_size=3))
def test_replies_and_observations_equal_one_opening(small, turns):
    """Built turn by turn, as a rollout is, or at once, as a demonstration is: the same ids."""
    messages = [{"role": "user", "content": "Go."}]
    ids = chat.opening(small, messages)
    for reply, answers in turns:
        ids += chat.reply(small, reply) + chat.observation(small, answers, closed=True)
        messages += [reply, *answers]
    assert ids == chat.opening(small, messages)


def test_a_turn_cut_short_is_closed_once(small):
    messages = [{"role": "tool", "content": "3 flights"}]
    cut, ended = (chat.observation(small, messages, closed=closed) for closed in (False, True))
    assert cut == [small.im_end, *ended]
    text = "\n<|im_start|>user\n<tool_response>\n3 flights\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert small.decode(ended) == text


@pytest.mark.parametrize(
    "message, complaint",
    [
        ({"role": "function", "content": "x"}, "unknown role 'function'"),
        ({"role": "user", "content": ["x"]}, "content of a user message is text, not list"),
        ({"role": "tool"}, "content of a tool message is text, not NoneType"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}, "JSON object, not str"),
    ],
)
def test_bad_messages(small, message, complaint):
    with pytest.raises(chat.ChatError, match=complaint):
        chat.opening(small, [{"role": "user", "content": "hi"}, message])
