"""Tests of the formats of calls: each reads back what it writes, and worlds read a turn as its format does."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import toolcalls
from envs.call_formats import FORMATS, as_hermes, written_in
from envs.toolcalls import Call

marks = ["</think>", "<think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
words = st.text(max_size=8) | st.sampled_from([*marks, '"}}', "{"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
calls = st.builds(Call, st.text(min_size=1, max_size=8), st.dictionaries(words, values, max_size=3))
plain = st.sampled_from(["", "I look.", "one\ntwo"])
thought = st.sampled_from(["", "<think>\n[TOOL_CALLS] or {}?\n</think>\n\n", "So {}?</think>"])
# Texts made of what means something in some format.
pieces = st.sampled_from(
    [*marks, '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {"x": "</think>"}}', "[", "]",
     "f[ARGS]{", "[CALL_ID]", ";", "\n", " ok ", '"', "{", "}", '"id": "a"', "NaN", toolcalls.REFUSED]
)  # fmt: skip
junk = st.lists(pieces, max_size=7).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@given(thought, plain, st.lists(calls, min_size=1, max_size=2))
def test_what_a_format_writes_is_read_back(name, thought, content, made):
    known = FORMATS[name]
    if name == "llama3_json":  # one call, alone in its turn
        content, made = "", made[:1]
    text = thought + known.write(content, made)
    turn = known.read(text)
    assert (turn.calls, turn.errors, turn.content) == (made, [], content)
    assert turn.thought.strip() == thought.strip()
    seen = toolcalls.parse(as_hermes(text, known))
    assert (seen.calls, seen.errors, seen.content) == (made, [], content)


@pytest.mark.parametrize("name", FORMATS)
@given(junk)
def test_worlds_read_a_turn_as_its_format_does(name, text):
    """Above all an error stays an error, and becomes no call."""
    known = FORMATS[name]
    turn, seen = known.read(text), toolcalls.parse(as_hermes(text, known))
    assert seen.calls == turn.calls and (not turn.errors or seen.errors)
    if name != "hermes":
        assert not (turn.calls and turn.errors) and len(turn.errors) < 2
        assert not turn.errors or seen.errors == turn.errors


LLAMA = '{"name": "f", "parameters": {"x": 1}}'
MISTRAL = '[{"name": "f", "arguments": {"x": 1}}]'


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama3_json", LLAMA),
        ("llama3_json", f"\n<|python_tag|>{LLAMA}\n"),
        ("llama3_json", f"<think>\n{{1}}\n</think>\n\n{LLAMA}"),
        ("mistral", f"[TOOL_CALLS]{MISTRAL}"),
        ("mistral", f"[TOOL_CALLS] {MISTRAL}"),
        ("mistral", "[TOOL_CALLS] " + MISTRAL.replace("}}]", '}, "id": "abcDEF123"}]')),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"x": 1}'),
        ("mistral", '[TOOL_CALLS]f{"x": 1}\n'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
    ],
)
def test_a_turn_of_the_family_is_a_call(name, text):
    turn = FORMATS[name].read(text)
    assert (turn.calls, turn.errors) == ([Call("f", {"x": 1})], [])
    assert turn.calls[0].id == ("abcDEF123" if "abcDEF123" in text else "")
    assert written_in(text, Call("f", {"x": 1})) == name
    assert written_in(text, Call("f", {"x": 2})) == ""


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("llama3_json", LLAMA.replace("parameters", "arguments"), 'the keys "name" and "parameters", and no "arguments"'),
        ("llama3_json", f"{LLAMA}; {LLAMA}", "not JSON: Extra data"),
        ("llama3_json", f"I call it: {LLAMA}", 'not in the format {"name": TOOL, "parameters"'),
        ("llama3_json", '<|python_tag|>search.call(query="x")', "not JSON"),
        ("llama3_json", 'search <|python_tag|>{"name": "f"}', "not in the format"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', "parameters must be a JSON object"),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1, "x": 2}}', "tool call has"),
        ("llama3_json", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "not in the format"),
        ("llama3_json", "<think>\nI never end", "<think> without </think>"),
        ("mistral", MISTRAL, "not in the format [TOOL_CALLS]"),
        ("mistral", f"[TOOL_CALLS] {MISTRAL[1:-1]}", "not in the format"),
        ("mistral", "[TOOL_CALLS] []", "not in the format"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1} and more', "not in the format [TOOL_CALLS]TOOL[ARGS]"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}g[ARGS]{}', "not in the format"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]', "not in the format"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1, "x": 2}', "tool call has"),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]1[ARGS]{}', "not JSON"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": ', "not JSON"),
        ("mistral", '[TOOL_CALLS]f[ARGS][1]', "not JSON"),
        ("mistral", f"[TOOL_CALLS] {MISTRAL} and more", "not JSON: Extra data"),
        ("mistral", f"[TOOL_CALLS] {MISTRAL[:-1]}, 3]", "not a JSON object"),
        ("mistral", "[TOOL_CALLS] " + MISTRAL.replace("}}]", '}, "id": "call_1"}]'), '"id" of a tool call must be nine'),
        ("mistral", "[TOOL_CALLS] " + MISTRAL.replace("1", "1e999"), "a number out of range"),
    ],
)  # fmt: skip
def test_what_only_resembles_a_call_is_an_error(name, text, words):
    turn = FORMATS[name].read(text)
    assert not turn.calls and words in turn.errors[0]
    seen = toolcalls.parse(as_hermes(text, FORMATS[name]))
    assert (seen.calls, seen.errors) == ([], turn.errors)


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_stays_what_it_is(name):
    structured = '{"answer": 3}' * (name != "llama3_json")
    for text in ("It is {7}.", "", " The names are [1, 2].\n", structured):
        assert as_hermes(text, FORMATS[name]) == text
        assert FORMATS[name].read(text).content == text.strip()


def test_later_models_of_mistral_write_a_tag_before_each_call():
    text = 'Both. [TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]g{}'
    turn = FORMATS["mistral"].read(text)
    assert (turn.content, turn.errors) == ("Both.", [])
    assert turn.calls == [Call("f", {"x": "[TOOL_CALLS]"}), Call("g", {})]


def test_a_refused_text_is_shown_to_judges():
    written = '{"name": "f", "parameters": {"x": "</tool_call>"}} and'
    text = as_hermes(written, FORMATS["llama3_json"])
    body = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert body["text"] == written
