"""Requests and answers of OpenAI's completions and chat completions, with vLLM's fields for token
ids.

Pure functions of JSON values. A request with an unsupported or unknown option is refused with the
option's name; ignoring it would silently give a wrong result.
"""

from __future__ import annotations

import difflib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envs import toolcalls
from models import chat
from models.tokenizer import Tokenizer, TokenizerError
from rl.trajectory import Sampling

Json = dict[str, Any]
MAX_CHOICES, MAX_STOPS, MAX_TOP = 128, 16, 20
NEUTRAL = {  # unsupported options that would change the sample, with the values that have no effect
    "logit_bias": (None, {}), "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0), "repetition_penalty": (None, 1), "min_p": (None, 0), "suffix": (None, ""),
    "best_of": (None, 1), "min_tokens": (None, 0), "allowed_token_ids": (None,), "bad_words": (None, []),
    "structured_outputs": (None,), "guided_json": (None,), "guided_regex": (None,), "guided_choice": (None,),
    "guided_grammar": (None,), "functions": (None, []), "function_call": (None, "none"),
    "use_beam_search": (None, False), "use_audio": (None, False), "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False), "skip_special_tokens": (None, False),
    "spaces_between_special_tokens": (None, True), "length_penalty": (None, 1), "chat_template": (None,),
    "add_generation_prompt": (None, True), "continue_final_message": (None, False),
    "add_special_tokens": (None, False), "documents": (None, []), "modalities": (None, ["text"]), "audio": (None,),
    "prediction": (None,), "reasoning_effort": (None,), "verbosity": (None,), "web_search_options": (None,),
    "allowed_tokens": (None,), "return_token_strs": (None, False), "parallel_tool_calls": (None, True),
}  # fmt: skip
# they describe the caller or how the request is handled; the answer is the same without them
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "priority", "request_id", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
READ = {
    "model", "max_tokens", "stop", "logprobs", "prompt_logprobs", "echo", "stream", "stream_options", "n",
    "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos", "return_token_ids",
    "return_tokens_as_token_ids", "response_format",
}  # fmt: skip
CHAT = {  # fields of chat completions only
    "messages", "tools", "tool_choice", "max_completion_tokens", "top_logprobs", "chat_template_kwargs",
}  # fmt: skip
TEXT = {"prompt"}  # of completions only


class Refused(ValueError):
    """A request that cannot be served; the message gives the reason. status: of the HTTP answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Request:
    """The generation that a request asks for and the form of its answer. `n` samples of each
    prompt, given as ids."""

    prompts: list[list[int]]
    sampling: Sampling
    n: int = 1
    stops: list[str] = field(default_factory=list)  # texts that end a generation and are cut off
    stream: bool = False
    usage: bool = False  # append a streaming event with the usage
    logprobs: bool = False
    top: int = 0  # number of the most probable tokens to return at each place
    token_ids: bool = False
    ids_as_text: bool = False  # name tokens "token_id:7" in log-probabilities
    echo: bool = False
    score: bool = False  # return log-probabilities of the prompt
    tools: bool = False  # extract tool calls from the text
    schema: Json | None = None  # hold the answer to this JSON schema


@dataclass
class Generated:
    """One choice, finished or partial. `tokens` ends with the token that completes a stop text, if
    there is one."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str  # "stop" | "length"
    version: int
    scores: list[float | None] = field(
        default_factory=list
    )  # log p of the prompt's tokens; None for the first
    top: list[dict[int, float]] = field(
        default_factory=list
    )  # log p of the most probable tokens at each place


def read(
    body: Any, path: str, model: str, tokenizer: Tokenizer, vocab: int, context: int
) -> Request:
    """Parse a request to /v1/completions or /v1/chat/completions. Raises Refused.

    model: the served name. vocab: of the model. context: most tokens of prompt and generation
    together.
    """
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    if _get(body, "model", str, model) != model:
        raise Refused(
            f"the model `{body['model']}` does not exist; this server has `{model}`",
            404,
            "model_not_found",
        )
    is_chat = path.endswith("chat/completions")
    refuse_unknown(body, READ | (CHAT if is_chat else TEXT))
    tools = [] if body.get("tool_choice") == "none" else _tools(body)
    prompts = [chat_prompt(body, tokenizer, tools)] if is_chat else text_prompts(body, tokenizer)
    for prompt in prompts:
        if not prompt:
            raise Refused("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise Refused(f"a prompt token is outside of the vocabulary 0..{vocab - 1}")
    max_tokens = _max_tokens(body, is_chat, max(map(len, prompts)), context)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise Refused(f"stop must be a text or a list of at most {MAX_STOPS} texts")
    logprobs = body.get("logprobs")
    if is_chat and not (logprobs is None or isinstance(logprobs, bool)):
        raise Refused(f"logprobs must be of type bool, not {json.dumps(logprobs)[:80]}")
    name = "top_logprobs" if is_chat else "logprobs"
    top = (
        0
        if isinstance(body.get(name), bool) and not is_chat
        else _number(body, name, int, 0, 0, MAX_TOP)
    )
    if top and is_chat and not logprobs:
        raise Refused("top_logprobs needs logprobs=true")
    top = 0 if top == 1 and not is_chat else top  # 1 names the sampled tokens, as it always did
    echo = _get(body, "echo", bool, False)
    score = body.get("prompt_logprobs") is not None or (echo and logprobs is not None)
    if body.get("prompt_logprobs") not in (None, 0):
        raise Refused(
            "prompt_logprobs above 0 are not supported: only those of the prompt tokens are available"
        )
    if echo and is_chat:
        raise Refused("echo is not supported in chat completions")
    if _get(body, "stream", bool, False) and score:
        raise Refused("log-probabilities of the prompt are not supported while streaming")
    if _get(body, "stream", bool, False) and top:
        raise Refused(f"{name} is not supported while streaming")
    if max_tokens == 0 and not echo:
        raise Refused("max_tokens=0 without echo leaves nothing to answer")
    options = _get(body, "stream_options", dict, {})
    refuse_unknown(options, {"include_usage"}, "stream_options.")
    schema = schema_of(body)
    if schema is not None and (tools or top or _get(body, "ignore_eos", bool, False)):
        raise Refused(
            "response_format is not supported together with tools, top_logprobs and ignore_eos"
        )
    return Request(
        prompts=prompts,
        sampling=sampling_of(body, tokenizer, max_tokens),
        n=_number(body, "n", int, 1, 1, MAX_CHOICES),
        stops=stops,
        stream=_get(body, "stream", bool, False),
        usage=_get(options, "include_usage", bool, False),
        logprobs=logprobs is not None and logprobs is not False,
        top=top,
        token_ids=_get(body, "return_token_ids", bool, False),
        ids_as_text=_get(body, "return_tokens_as_token_ids", bool, False),
        echo=echo,
        score=score,
        tools=bool(tools),
        schema=schema,
    )


def schema_of(body: Json) -> Json | None:
    """Return the JSON schema that `response_format` asks for, None if any text will do."""
    wanted = _get(body, "response_format", dict, {"type": "text"})
    kind = wanted.get("type")
    refuse_unknown(
        wanted, {"type", *(["json_schema"] if kind == "json_schema" else [])}, "response_format."
    )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise Refused(
            f"response_format.type must be text, json_object or json_schema, not {json.dumps(kind)[:80]}"
        )
    named = _get(wanted, "json_schema", dict, {})
    refuse_unknown(
        named, {"name", "description", "schema", "strict"}, "response_format.json_schema."
    )
    if not isinstance(named.get("schema"), dict):
        raise Refused("response_format.json_schema.schema must be a JSON schema, an object")
    return named["schema"]


def refuse_unknown(body: Json, known: set[str], prefix: str = "") -> None:
    """Raise Refused for the first field that is not supported or not known."""
    for name, value in body.items():
        if name in known or (not prefix and name in WITHOUT_EFFECT):
            continue
        if not prefix and name in NEUTRAL:
            if value not in NEUTRAL[name]:
                inner = f".{next(iter(value))}" if isinstance(value, dict) and value else ""
                raise Refused(f"{name}{inner} is not supported by this server")
        elif value is not None:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise Refused(
                f"{prefix}{name} is unknown to this server{hint}: it would have no effect"
            )


def _max_tokens(body: Json, is_chat: bool, prompt: int, context: int) -> int:
    """Return the tokens to generate; by default 16 for a text and all that fit for a chat, as
    OpenAI does."""
    wanted = _number(body, "max_completion_tokens", int, None, 0) if is_chat else None
    wanted = (
        _number(body, "max_tokens", int, None if is_chat else 16, 0) if wanted is None else wanted
    )
    if wanted is None:
        wanted = max(context - prompt, 1)
    if prompt + wanted > context:
        raise Refused(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt + wanted} tokens"
            f" ({prompt} in the prompt, {wanted} in the completion).",
            code="context_length_exceeded",
        )
    return wanted


def sampling_of(body: Json, tokenizer: Tokenizer, max_tokens: int) -> Sampling:
    """Return the sampling settings: temperature 1 by default, and a random seed if none is
    given."""
    stop_ids = body.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in stop_ids
    ):
        raise Refused("stop_token_ids must be a list of token ids")
    ends = () if _get(body, "ignore_eos", bool, False) else (tokenizer.im_end, tokenizer.endoftext)
    top_k = _number(body, "top_k", int, 0, -1)
    seed = _number(body, "seed", int, None, -(2**63), 2**64)
    top_p = _number(body, "top_p", float, 1.0, 0.0, 1.0)
    return Sampling(
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", float, 1.0, 0.0),
        top_p=top_p or 1e-9,
        top_k=max(top_k, 0),
        stop_tokens=tuple(dict.fromkeys([*ends, *stop_ids])),
        seed=uuid.uuid4().int % 2**64 if seed is None else seed % 2**64,
    )


def text_prompts(body: Json, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of `prompt`: a text, texts, ids, or lists of ids. Control tokens in
    texts are plain text."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) for part in prompt):
            return [tokenizer.encode(part) for part in prompt]
        for ids in [prompt] if isinstance(prompt[0], int) else prompt:
            if not isinstance(ids, list) or not all(
                isinstance(i, int) and not isinstance(i, bool) for i in ids
            ):
                break
        else:
            return [prompt] if isinstance(prompt[0], int) else prompt
    raise Refused(
        "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"
    )


def chat_prompt(body: Json, tokenizer: Tokenizer, tools: Sequence[Json]) -> list[int]:
    """Return `messages` in the chat template, up to the header of the next assistant turn."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or not all(
        k == "enable_thinking" and type(v) is bool for k, v in options.items()
    ):
        raise Refused(
            "chat_template_kwargs may hold enable_thinking, true or false, and nothing else"
        )
    try:
        tokenizer = tokenizer.with_thinking(options["enable_thinking"]) if options else tokenizer
        return chat.opening(tokenizer, [_message(message) for message in messages], tools)
    except (chat.ChatError, TokenizerError) as error:
        raise Refused(str(error)) from None


def _message(message: Any) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message must be an object with a role")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            raise Refused("only parts of type text are supported in a message's content")
        content = "".join(part["text"] for part in content)
    result: Json = {"role": role, "content": "" if content is None else content}
    if isinstance(message.get("reasoning_content"), str):
        result["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        try:
            result["tool_calls"] = [_call(call["function"]) for call in calls]
        except (KeyError, TypeError, ValueError):
            raise Refused(
                'a tool call must be {"function": {"name", "arguments": a JSON object as text}}'
            ) from None
    return result


def _call(function: Json) -> Json:
    arguments = function["arguments"]
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict) or not isinstance(function["name"], str):
        raise ValueError
    return {"name": function["name"], "arguments": arguments}


def _tools(body: Json) -> list[Json]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refused("tool_choice must be auto or none: this server cannot force a tool call")
    named = isinstance(tools, list) and all(
        isinstance(t, dict)
        and isinstance(t.get("function"), dict)
        and isinstance(t["function"].get("name"), str)
        for t in tools
    )
    if not named:
        raise Refused(
            'tools must be a list of {"type": "function", "function": {"name", "description", "parameters"}}'
        )
    return tools


def _get(body: Json, name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise Refused(f"{name} must be of type {kind.__name__}, not {json.dumps(value)[:80]}")
    return value


def _number(
    body: Json, name: str, kind: type, default: Any, low: float, high: float = float("inf")
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise Refused(f"{name} must be a number {bounds}, not {json.dumps(value)[:80]}")
    return value


# --- answers --------------------------------------------------------------------------------------


class Answers:
    """Builds the answer to one request, whole or as streaming events."""

    def __init__(self, request: Request, path: str, model: str, tokenizer: Tokenizer):
        self.request, self.chat, self.tokenizer = (
            request,
            path.endswith("chat/completions"),
            tokenizer,
        )
        kind = "chat.completion" if self.chat else "text_completion"
        self.head = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generated: Sequence[Generated]) -> Json:
        choices = [self._choice(n, g) for n, g in enumerate(generated)]
        answer = self.head | {"choices": choices, "usage": usage_of(self.request, generated)}
        if self.chat and self.request.token_ids:
            answer["prompt_token_ids"] = generated[0].prompt
        return answer

    def _choice(self, index: int, g: Generated) -> Json:
        choice: Json = {"index": index, "finish_reason": g.finish, "weights_version": g.version}
        if self.chat:
            message, called = self.message(g.text)
            choice |= {"message": message, "logprobs": self.logprobs(g.tokens, g.logprobs, g.top)}
            choice |= {"finish_reason": "tool_calls"} if called else {}
        else:
            text, tokens, logprobs, top = g.text, g.tokens, g.logprobs, g.top
            if self.request.echo:
                text, tokens = self.tokenizer.decode(g.prompt) + text, g.prompt + tokens
                logprobs, top = g.scores + logprobs, [{} for _ in g.prompt] + top if top else []
            choice |= {"text": text, "logprobs": self.logprobs(tokens, logprobs, top)}
            if self.request.token_ids:
                choice["prompt_token_ids"] = g.prompt
        if self.request.token_ids:
            choice["token_ids"] = g.tokens
        if self.request.score and g.scores:
            rows = [
                {str(i): {"logprob": x, "decoded_token": self.name(i)}}
                for i, x in zip(g.prompt[1:], g.scores[1:])
            ]
            choice["prompt_logprobs"] = [None, *rows]
        return choice

    def message(self, text: str) -> tuple[Json, bool]:
        """Return (assistant message, True if it calls tools). Calls that cannot be parsed stay in
        the text."""
        if self.request.tools:
            turn = toolcalls.parse(text)
            if turn.calls and not turn.errors:
                return {
                    "role": "assistant", "content": turn.content or None, "refusal": None,
                    "tool_calls": [self.call(call) for call in turn.calls],
                }, True  # fmt: skip
        return {"role": "assistant", "content": text, "refusal": None}, False

    def call(self, call: toolcalls.Call) -> Json:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.request.ids_as_text else self.tokenizer.decode([token])

    def logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[dict[int, float]] = (),
    ) -> Json | None:
        if not self.request.logprobs:
            return None
        names, top = [self.name(token) for token in tokens], list(top) or [{} for _ in tokens]
        if self.chat:
            rows = [
                self._row(name, x)
                | {"top_logprobs": [self._row(self.name(i), y) for i, y in best.items()]}
                for name, x, best in zip(names, logprobs, top)
            ]
            return {"content": rows, "refusal": None}
        top = [
            None if x is None else {self.name(i): y for i, y in best.items()} | {name: x}
            for name, x, best in zip(names, logprobs, top)
        ]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(self.tokenizer.decode([token]))
        return {
            "tokens": names,
            "token_logprobs": list(logprobs),
            "top_logprobs": top,
            "text_offset": offsets,
        }

    @staticmethod
    def _row(name: str, logprob: float | None) -> Json:
        return {"token": name, "logprob": logprob, "bytes": list(name.encode("utf-8", "replace"))}

    # Streams.

    def event(
        self,
        index: int,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        first: bool,
    ) -> Json:
        """Return the event for one piece of a choice."""
        choice: Json = {
            "index": index,
            "finish_reason": None,
            "logprobs": self.logprobs(tokens, logprobs),
        }
        choice |= (
            {"delta": {"content": text} | ({"role": "assistant"} if first else {})}
            if self.chat
            else {"text": text}
        )
        if self.request.token_ids:
            choice["token_ids"] = list(tokens)
        return self._chunk([choice])

    def last_event(
        self, index: int, finish: str, calls: Sequence[toolcalls.Call], version: int
    ) -> Json:
        """Return the event that ends a choice, with its tool calls."""
        choice: Json = {
            "index": index,
            "finish_reason": finish,
            "logprobs": None,
            "weights_version": version,
        }
        if self.chat:
            tool_calls = [self.call(call) | {"index": n} for n, call in enumerate(calls)]
            choice["delta"] = {"tool_calls": tool_calls} if tool_calls else {}
            choice["finish_reason"] = "tool_calls" if tool_calls else finish
        else:
            choice["text"] = ""
        return self._chunk([choice])

    def usage_event(self, generated: Sequence[Generated]) -> Json:
        return self._chunk([]) | {"usage": usage_of(self.request, generated)}

    def _chunk(self, choices: list[Json]) -> Json:
        return self.head | {
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "choices": choices,
        }


def usage_of(request: Request, generated: Sequence[Generated]) -> Json:
    """Return the token counts. Each prompt counts once, even with several samples."""
    prompt, completion = sum(map(len, request.prompts)), sum(len(g.tokens) for g in generated)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def error(message: str, code: str = "invalid_request_error") -> Json:
    """Return the body of an error answer."""
    return {"error": {"message": message, "type": code, "param": None, "code": code}}
