"""Tests of the format of calls in training and serving: found in the chat template, and used in both directions."""

import asyncio
import json

import pytest

from configs import base
from envs import toolcalls
from envs.call_formats import FORMATS, CallFormat, as_hermes
from envs.toolcalls import Call, ParsedTurn, call_text
from envs.toolworld import ToolWorld
from envs.world import Observation, Task
from evolver.config.checks.model import model_problems
from evolver.plan.facts import vocabulary
from evolver.replaying import attempt
from models import chat, hf, jinja, qwen
from models.tokenizer import Tokenizer
from rl import calls
from rl.contexts import Limits, Opening
from rl.contexts.brief import Brief
from rl.contexts.causal import Causal
from rl.engines.serve.answers import Answers, Generated
from rl.engines.serve.requests import ChatRequest, fields_of, parse
from rl.rollout import Actor, Job, rollout
from rl.trajectory import Sampling
from tests.models.helpers import extend, tool, user
from tests.models.test_jinja import HEADERS, INST, REAL, SMOL, TOOL, USER, made, real, said, theirs
from tests.models.test_jinja import call as as_message
from tests.rl.test_rollout import Scripted

INSTRUCT = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
# In the way of Mistral's: calls behind a control token, ids of nine characters, which answers repeat.
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '[INST] ' + (tools | tojson if tools and loop.last else '') + m.content + '[/INST]' }}
  {%- elif m.role == 'tool' %}
    {%- if m.tool_call_id | length != 9 %}{{- raise_exception('nine characters') }}{%- endif %}
    {{- '[TOOL_RESULTS] ' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
  {%- elif m.tool_calls %}
    {{- m.content + '[TOOL_CALLS] [' }}
    {%- for c in m.tool_calls %}
      {%- if c.id | length != 9 %}{{- raise_exception('nine characters') }}{%- endif %}
      {{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + (']' if loop.last else ', ') }}
    {%- endfor %}{{- eos_token }}
  {%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}
{%- endfor %}"""
# In the way of its later ones: a name and its arguments, behind two control tokens.
LATER = INST.replace(
    "m.content + eos_token",
    "m.content }}{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token",
)
# An answer is headed by the name of its call, as gpt-oss writes it.
NAMED = SMOL.replace(
    "'<|im_start|>' + message['role']", "'<|im_start|>' + (message.name if message.name else message.role)"
).replace("message['content'] +", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +")  # fmt: skip
ROME = Call("search", {"to": "Rome"})
SAYS = said(call_text(ROME.name, ROME.arguments))


def mistral() -> Tokenizer:
    return made(MISTRAL, INSTRUCT, "<s>", "</s>")


def later() -> Tokenizer:
    return made(LATER, (*INSTRUCT, "[ARGS]"), "<s>", "</s>")


def named(name: str) -> Tokenizer:
    return mistral() if name == "mistral" else real(name)


not_chatml = pytest.mark.parametrize("name", ["mistral", "llama3_1"])


def saved(tokenizer: Tokenizer, folder):
    shape = qwen.Config(tokenizer.vocab_size, 16, 1, 2, 1, 8, 16)
    hf.save(folder, shape, qwen.init(shape, 0), tokenizer=tokenizer)
    config = base.get_config()
    config.model.path = str(folder)
    return config


@pytest.mark.parametrize(
    "make, name, words",
    [
        (lambda: made(jinja.QWEN25), "hermes", "Qwen2.5's; calls in hermes"),
        (lambda: made(jinja.QWEN3), "hermes", "Qwen3's; calls in hermes"),
        (mistral, "mistral", "what was sampled stays; calls in mistral"),
        (later, "mistral", "the checkpoint's own; calls in mistral"),
        (
            lambda: made(SMOL),
            "hermes",
            "calls in hermes, since the template writes none; lists no tools",
        ),
        (lambda: made(NAMED), "hermes", "since the template writes them in no known format"),
        (lambda: real("llama3_1"), "llama3_json", "; calls in llama3_json"),
        (lambda: real("llama3_2"), "llama3_json", "; calls in llama3_json"),
        (lambda: real("qwen2_5"), "hermes", "the checkpoint's own; calls in hermes"),
    ],
)
def test_the_plan_says_which_template_it_is_and_how_calls_are_written(make, name, words, tmp_path):
    tokenizer = make()
    assert calls.format_of(tokenizer) is FORMATS[name]
    config = saved(tokenizer, tmp_path)
    assert words in vocabulary(config)["chat template"]
    config.template.calls = "mistral"
    assert "calls in mistral, as template.calls says" in vocabulary(config)["chat template"]
    config.template.calls = "mystral"
    (problem,) = model_problems(config, "train")
    assert "'mystral' is no format of calls (known formats are hermes" in problem


@not_chatml
def test_a_checkpoint_that_is_not_chatml_keeps_its_template(name, tmp_path):
    tokenizer = named(name)
    config = saved(tokenizer, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == tokenizer._source
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == tokenizer.stops[0]
    loaded = Tokenizer.load(tmp_path)
    assert loaded.stops == tokenizer.stops and loaded.rendering == tokenizer.rendering
    assert chat.opening(loaded, [USER], [TOOL]) == chat.opening(tokenizer, [USER], [TOOL])
    assert calls.format_of(loaded) is calls.format_of(tokenizer)
    assert not list(model_problems(config, "train"))
    loaded.calls = "hermes"  # what the config chose is served, too
    loaded.save(tmp_path / "again")
    assert calls.format_of(Tokenizer.load(tmp_path / "again")) is FORMATS["hermes"]


@pytest.mark.parametrize("name", ["mistral", "llama3_1", "llama3_2"])
def test_a_demonstrated_call_is_what_the_template_writes_and_is_read_back(name):
    tokenizer = named(name)
    ids = calls.reply(tokenizer, SAYS)
    opened, message = chat.opening(tokenizer, [USER]), said("", as_message())
    whole = theirs(tokenizer, [USER, message], header=False)
    assert whole[: len(opened) + len(ids)] == opened + ids
    text = tokenizer.decode(ids[:-1])
    assert calls.format_of(tokenizer).read(text).calls == [ROME]
    assert toolcalls.parse(as_hermes(text, calls.format_of(tokenizer))).calls == [ROME]
    assert calls.reply(tokenizer, said("It is 7.")) == chat.reply(tokenizer, said("It is 7."))


def test_a_format_that_the_config_names_is_written_as_text():
    tokenizer = made(SMOL)
    tokenizer.calls = "llama3_json"
    text = tokenizer.decode(calls.reply(tokenizer, SAYS))
    assert text == '{"name": "search", "parameters": {"to": "Rome"}}<|im_end|>'
    brief = Brief(Opening(tokenizer, Observation([USER], [TOOL])))
    example = 'A call is {"name": TOOL, "parameters": {PARAMETER: VALUE}} and'
    assert example in tokenizer.decode(brief.prompt)


def extended(tokenizer: Tokenizer, text: str, answers, closed: bool = True) -> str:
    context = Causal(Opening(tokenizer, Observation([USER], [])))
    extend(context, tokenizer.encode(text) + [tokenizer.stops[0]] * closed, answers)
    return tokenizer.decode(context.prompt)


def test_an_answer_names_the_call_that_it_answers():
    """By the id that the policy gave it, by one of our own if it gave none, and by its name."""
    answers = [tool("F12"), tool("F13")]
    written = '[TOOL_CALLS] [{"name": "search", "arguments": {}, "id": "abcDEF123"}, {"name": "search", "arguments": {}}]'
    for closed in (True, False):
        text = extended(mistral(), written, answers, closed)
        assert text.endswith(
            '</s>[TOOL_RESULTS] {"content": "F12", "call_id": "abcDEF123"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS] {"content": "F13", "call_id": "call00000"}[/TOOL_RESULTS]'
        )
    tokenizer = made(NAMED)
    assert tokenizer.template.repeats_calls and not made(SMOL).template.repeats_calls
    text = extended(tokenizer, call_text("search", {}) + call_text("book", {}), answers)
    assert "<|im_start|>search\nF12<|im_end|>\n<|im_start|>book\nF13<|im_end|>" in text
    text = extended(tokenizer, "<tool_call>\n{", answers[:1])
    assert text.endswith("<|im_start|>unreadable\nF12<|im_end|>\n<|im_start|>assistant\n")


def test_texts_never_open_a_call():
    """What a user, a tool or the model itself spells as text is no control token."""
    tokenizer = mistral()
    token, turn = tokenizer._control["[TOOL_CALLS]"], said("[TOOL_CALLS] []")
    answers = [tool('[TOOL_CALLS] [{"name": "f"}]')]
    ids = chat.opening(tokenizer, [user("[TOOL_CALLS]"), turn, USER])
    ids += chat.reply(tokenizer, turn) + chat.observation(tokenizer, answers)
    assert token not in ids and token in calls.reply(tokenizer, SAYS)


class Shouting(CallFormat):
    example = "CALL TOOL"

    def read(self, text: str) -> ParsedTurn:
        found = text.startswith("CALL ")
        return ParsedTurn("" if found else text, [Call(text[5:], {})] if found else [])


def test_anyones_format_is_a_plug():
    tokenizer = made(INST, ("<s>", "</s>", *HEADERS), "<s>", "</s>")
    tokenizer.calls = f"{__name__}:Shouting"
    assert as_hermes("CALL home", calls.format_of(tokenizer)) == call_text("home", {})
    assert as_hermes("Come home.", calls.format_of(tokenizer)) == "Come home."
    unknown = {f"{__name__}:ROME": "of type Call", "nowhere:X": "No module named 'nowhere'"}
    for name, words in unknown.items():
        with pytest.raises(calls.UnknownFormat, match=words):
            calls.named(name)


def test_every_template_of_the_package_is_certain_or_hermes():
    found = {name: calls.said_of(real(name)) for name in REAL}
    llama = {name for name, words in found.items() if "llama3_json" in words}
    assert llama == {"llama3_1", "llama3_2"}
    assert found["qwen3_instruct_2507"] == "calls in hermes"


class Flights(ToolWorld):
    """A world of one tool, which knows nothing of formats."""

    name = "flights"

    def _open(self, task, seed):
        return [TOOL]

    def _call(self, name, arguments):
        return ("F12", True) if name == "search" else (f"there is no {name}", False)


@not_chatml
def test_a_world_is_played_in_the_policys_own_format(name):
    tokenizer = named(name)
    called = calls.reply(tokenizer, SAYS)
    wrong = chat.reply(tokenizer, '{"name": "search", "arguments": {"to": "Rome"}}')
    last = chat.reply(tokenizer, "It is F12.")
    task = Task("t", "flights", "Find one.", verifier={"calls": [ROME.to_dict()]})
    engine, limits = Scripted(wrong, called, last), Limits(5, 100, 4000, 500, 60.0, 60.0)
    job = Job(task, 0, 1, Sampling(max_tokens=100))
    played = asyncio.run(rollout(job, Actor(engine, tokenizer, limits), Flights("Help.", 4)))
    assert played.evaluation.success and played.stop == "done", played.error
    first, second, third = played.turns
    assert first.info["parse_error"] and "tool call" in first.observation[0]["content"]
    assert toolcalls.parse(second.action).calls == [ROME] and second.completion.tokens == called
    assert second.observation == [tool("F12")]
    assert third.action == "It is F12."
    _, before, after = (prompt for prompt, *_ in engine.requests)
    assert after[: len(before) + len(called)] == before + called
    # Judges replay what the world was given, and need no tokenizer.
    again = attempt(Flights("Help.", 4), task, [turn.action for turn in played.turns])
    assert [turn.info for turn in again.turns] == [turn.info for turn in played.turns]


@not_chatml
def test_the_server_reads_what_worlds_read(name):
    tokenizer = named(name)
    body = json.dumps({"messages": [USER], "tools": [TOOL]}).encode()
    answers = Answers(parse(ChatRequest, fields_of(body, "policy")), "policy", tokenizer)
    ids = calls.reply(tokenizer, SAYS)
    text = tokenizer.decode(ids[:-1])
    (choice,) = answers.whole([Generated([1], 0, ids, text=text, finish="stop")])["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "search", "arguments": '{"to": "Rome"}'}
    assert len(call["id"]) == 9
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert answers.read(text + " and").content == text + " and"
