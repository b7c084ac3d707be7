"""The tool-call format: parsing inverts rendering and never raises."""

import json
import signal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envs.toolcalls import CLOSE, END_THINK, OPEN, THINK, Call, call_text, parse, run_calls, spoken

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def test_text_of_a_call():
    assert call_text("search", {"to": "Rome"}) == (
        '<tool_call>\n{"name": "search", "arguments": {"to": "Rome"}}\n</tool_call>'
    )
    assert "Zürich" in call_text("search", {"to": "Zürich"})


def test_tags_inside_a_call_do_not_end_it():
    arguments = {CLOSE: [f"a{CLOSE}b{OPEN}", "<\\/tool_call>", {"c": CLOSE * 2}]}
    turn = parse(call_text("note", arguments) + call_text("end", {}))
    assert turn.calls == [Call("note", arguments), Call("end", {})] and not turn.errors


@given(
    st.lists(st.tuples(texts.filter(bool), st.dictionaries(texts, values, max_size=3)), max_size=3),
    texts,
)
def test_round_trip(calls, content):
    assume(OPEN not in content and CLOSE not in content)
    turn = parse("\n".join([content, *(call_text(*call) for call in calls)]))
    assert turn.errors == []
    assert turn.calls == [Call(name, arguments) for name, arguments in calls]
    assert turn.content == content.strip()


pieces = st.sampled_from(
    [
        OPEN, CLOSE, THINK, END_THINK, call_text("a", {"b": END_THINK}), "\\", "\n", "{", "}", '"',
        '"name"', ": ", "[", "1e999", "\\ud800", "NaN", "arguments",
    ]
)  # fmt: skip
junk = st.lists(pieces | st.text(max_size=5), max_size=20).map("".join)


@given(junk)
def test_never_raises(text):
    turn = parse(text)
    for error in turn.errors:
        assert error and "\n" not in error
    calls = [call.to_dict() for call in turn.calls]
    json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()


@given(junk)
def test_what_is_spoken_reads_like_the_whole_turn(text):
    turn, said = parse(text), parse(spoken(text))
    assert text.startswith(turn.thought)
    assert (said.calls, said.content, said.thought) == (turn.calls, turn.content, "")
    assert said.errors == turn.errors or spoken(text) == ""


def test_a_call_in_a_thought_is_no_call():
    a, b = call_text("a", {}), call_text("b", {})
    for text, calls, content, errors in (
        (f"{THINK}{a}{END_THINK} I will not.", [], "I will not.", 0),
        (f"{THINK}hm{END_THINK}First. {a} Then.", ["a"], "First.\nThen.", 0),
        (f"the prompt opened this thought {a}{END_THINK}{b}", ["b"], "", 0),
        (f"{THINK}{OPEN} is how it begins{END_THINK}{b}", ["b"], "", 0),
        (f"{THINK}{a}{END_THINK}{THINK}{a}{END_THINK}{b}", ["b"], "", 0),
        (f"{THINK}{a}", [], "", 1),
        (f"{a} and {THINK}{b}", ["a"], "and", 1),
    ):
        turn = parse(text)
        assert ([call.name for call in turn.calls], turn.content) == (calls, content), text
        assert len(turn.errors) == errors
    assert spoken(f"{THINK}{a}{END_THINK}\n\nI will not.") == "I will not."
    assert (spoken(a), spoken(f"{THINK}{a}"), spoken(f"no {THINK}{a}")) == (a, "", f"no {THINK}")


@pytest.mark.parametrize("tag", [OPEN, CLOSE, THINK, END_THINK, f'\\"{END_THINK}\\\\'])
def test_a_tag_in_a_string_of_a_call_is_text(tag):
    body = f'{{"name": "note", "arguments": {{"{tag}": ["{tag} x", "y"]}}}}'
    text = f"{THINK}{OPEN}{body}{CLOSE}{END_THINK}said {OPEN} {body}\n{CLOSE}"
    turn = parse(text)
    assert turn.calls == [Call(**json.loads(body))] and not turn.errors
    assert turn.content == "said" and spoken(text).startswith(f"said {OPEN}")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "delete", "parameters": {"path": "/x"}}', '"parameters"'),
        ('{"name": "delete", "args": {"path": "/x"}}', '"args"'),
        ('{"name": "delete", "path": "/x"}', '"path"'),
        ('{"name": "delete", "arguments": {}, "path": "/x"}', '"path"'),
        ('{"name": "delete", "arguments": {}, "": 1}', '""'),
        ('{"Name": "delete", "name": "look"}', '"Name"'),
        ('{"tool": "delete", "arguments": {}}', '"tool"'),
        ('{"type": "function", "function": {"name": "delete"}}', '"function"'),
        ('{"name": "delete", "a\\nb": 1}', "keys"),
        ('{"name": "look", "name": "delete"}', '"name" twice'),
        ('{"name": "look", "n\\u0061me": "delete"}', '"name" twice'),
        ('{"name": "pay", "arguments": {}, "arguments": {"to": 1}}', '"arguments" twice'),
        ('{"name": "pay", "arguments": {"amount": 1, "amount": 1000}}', '"amount" twice'),
        ('{"name": "pay", "arguments": {"to": [{"a": 1}, {"b": 1, "b": 1}]}}', '"b" twice'),
        ('{"name": "pay", "arguments": null}', "arguments"),
        ('{"name": "pay", "arguments": []}', "arguments"),
        ('{"name": ["pay"]}', "name"),
        ('{"name": ""}', "name"),
        ('{"arguments": {}}', "name"),
        ("{'name': 1}", "not JSON"),
        ('{"name": "pay"} {"name": "pay"}', "not JSON"),
        ('[{"name": "pay"}]', "object"),
        ('"pay"', "object"),
        ('{"name": "pay", "arguments": {"x": -Infinity}}', "number"),
        (f'{{"name": "pay", "arguments": {{"x": {"1" * 400}}}}}', "number"),
        ('{"name": "pay", "arguments": "{}"}', "arguments"),
        ('{"name": "pay", "arguments": {"x\\udc00": 1}}', "text"),
        ('{"name": "pay", "arguments": {"\\ud800": 1, "\\udc00": 1}}', "text"),
        (f'{{"name": "pay", "arguments": {{"x": {"[" * 200}1{"]" * 200}}}}}', "deep"),
    ],
)  # fmt: skip
def test_a_call_that_could_mean_another_is_an_error(body, said):
    turn = parse(f"{OPEN}\n{body}\n{CLOSE}")
    assert turn.calls == [] and len(turn.errors) == 1
    assert said in turn.errors[0] and len(turn.errors[0]) < 200
    messages, info = run_calls(turn, lambda name, arguments: ("ran", True), 9)
    assert (info["errors"], info["parse_error"]) == (1, True)
    assert messages == [{"role": "tool", "content": f"error: {turn.errors[0]}"}]


@pytest.mark.parametrize(
    "text, said",
    [
        ("<tool_call>\n{}", "without </tool_call>"),
        ("hello</tool_call>", "without <tool_call>"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "deep"),
    ],
)
def test_a_call_without_a_beginning_or_an_end_is_an_error(text, said):
    turn = parse(text)
    assert turn.calls == [] and len(turn.errors) == 1 and said in turn.errors[0]


def test_a_broken_call_does_not_affect_the_others():
    turn = parse(
        f"first {call_text('a', {})} then {OPEN}broken{CLOSE} and {call_text('b', {'x': 1})} last"
    )
    assert [call.name for call in turn.calls] == ["a", "b"]
    assert len(turn.errors) == 1
    assert turn.content == "first\nthen\nand\nlast"


def test_missing_arguments_mean_no_arguments():
    assert parse('<tool_call>{"name": "a"}</tool_call>').calls == [Call("a", {})]


def test_calls_run_in_order_up_to_a_number_and_what_is_refused_is_said():
    called = []

    def call(name, arguments):
        called.append((name, arguments))
        return f"{name} done" if name != "b" else "error: no b", name != "b"

    written = "".join(call_text(name, {"n": n}) for n, name in enumerate("abc"))
    turn = parse(f"{OPEN}broken{CLOSE}{written}")
    messages, info = run_calls(turn, call, 2)
    assert called == [("a", {"n": 0}), ("b", {"n": 1})]
    assert [message["content"] for message in messages] == [
        "a done", "error: no b", f"error: {turn.errors[0]}", "error: 2 calls a turn at most"
    ]  # fmt: skip
    assert {message["role"] for message in messages} == {"tool"}
    assert [(made["name"], made["result"], made["ok"]) for made in info["calls"]] == [
        ("a", "a done", True), ("b", "error: no b", False)
    ]  # fmt: skip
    assert (info["errors"], info["parse_error"]) == (3, True)
    nothing = {"calls": [], "errors": 0, "parse_error": False}
    assert run_calls(parse("text alone"), call, 2) == ([], nothing)


def test_many_empty_calls_are_read_in_one_pass():
    """A quadratic parser needs minutes of CPU here; the guard only ends those."""
    for part in (
        OPEN + CLOSE,
        OPEN + END_THINK,
        OPEN + '{"',
        OPEN + '{\\"',
        OPEN,
        CLOSE,
        CLOSE + OPEN,
    ):
        text = part * 100_000
        signal.setitimer(signal.ITIMER_PROF, 60)
        signal.signal(signal.SIGPROF, lambda *_: pytest.fail("a minute of CPU was not enough"))
        try:
            turn = parse(text)
            spoken(text)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert not turn.calls and not turn.content
        assert turn.errors or turn.thought == text
