"""Answers of OpenAI's completions and chat completions, whole or as streaming events."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from envs import toolcalls
from models.tokenizer import Tokenizer
from rl.calls import format_of
from rl.engines.serve.requests import ChatRequest, Generation, Json, TextRequest

MAX_MESSAGE = 2000  # characters of an error, which may quote the request


@dataclass
class Generated:
    """One choice, finished or partial. `tokens` ends with the token that completes a stop text, if
    there is one."""

    prompt: list[int]
    version: int  # of the weights
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish: str = ""  # "length" or "stop" at the end
    # log p of the prompt's tokens; None for the first
    scores: list[float | None] = field(default_factory=list)
    # log p of the most probable tokens at each place
    top: list[dict[int, float]] = field(default_factory=list)


class Answers:
    """Builds the answer to one request. model: the served name."""

    def __init__(self, request: Generation, model: str, tokenizer: Tokenizer):
        self.request, self.tokenizer = request, tokenizer
        self.chat, self.format = isinstance(request, ChatRequest), format_of(tokenizer)
        self.head: Json = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generated: Sequence[Generated]) -> Json:
        """Return the answer with these choices, in order."""
        choices = [self._choice(index, g) for index, g in enumerate(generated)]
        answer = self.head | {"choices": choices, "usage": self._usage(generated)}
        if self.chat and self.request.return_token_ids:
            answer["prompt_token_ids"] = generated[0].prompt
        return answer

    def event(self, index: int, g: Generated, text: str, sent: int, *, first: bool) -> Json:
        """Return the event for a piece of text and for the tokens after the first `sent`."""
        tokens = g.tokens[sent:]
        logprobs = self._logprobs(tokens, g.logprobs[sent:], [])
        choice: Json = {"index": index, "finish_reason": None, "logprobs": logprobs}
        if self.chat:
            choice["delta"] = {"content": text} | ({"role": "assistant"} if first else {})
        else:
            choice["text"] = text
        if self.request.return_token_ids:
            choice["token_ids"] = tokens
        return self._chunk([choice])

    def last_event(self, index: int, g: Generated, turn: toolcalls.ParsedTurn) -> Json:
        """Return the event that ends a choice, with its thought and its tool calls."""
        choice: Json = {
            "index": index, "finish_reason": "tool_calls" if turn.calls else g.finish,
            "logprobs": None, "weights_version": g.version,
        }  # fmt: skip
        if not self.chat:
            choice["text"] = ""
            return self._chunk([choice])
        choice["delta"] = _thought(turn)
        if turn.calls:
            calls = [_call(call) | {"index": n} for n, call in enumerate(turn.calls)]
            choice["delta"]["tool_calls"] = calls
        return self._chunk([choice])

    def usage_event(self, generated: Sequence[Generated]) -> Json:
        """Return the event with the token counts."""
        return self._chunk([]) | {"usage": self._usage(generated)}

    def read(self, text: str) -> toolcalls.ParsedTurn:
        """Return a text as the worlds read it, if the request has tools. A text that holds errors
        stays whole."""
        turn = self.format.read(text) if self.request.parses_tools else None
        if turn is None or turn.errors:
            return toolcalls.ParsedTurn(text)
        if not turn.calls:
            turn.content = text[len(turn.thought) :].lstrip() if turn.thought else text
        return turn

    def _choice(self, index: int, g: Generated) -> Json:
        turn = self.read(g.text)
        choice: Json = {
            "index": index, "finish_reason": "tool_calls" if turn.calls else g.finish,
            "weights_version": g.version,
        }  # fmt: skip
        if self.chat:
            message: Json = {"role": "assistant", "content": turn.content, "refusal": None}
            message |= _thought(turn)
            if turn.calls:
                message["content"] = turn.content or None
                message["tool_calls"] = list(map(_call, turn.calls))
            choice["message"] = message
            choice["logprobs"] = self._logprobs(g.tokens, g.logprobs, g.top)
        else:
            text, tokens, logprobs, top = g.text, g.tokens, g.logprobs, g.top
            if isinstance(self.request, TextRequest) and self.request.echo:
                text, tokens = self.tokenizer.decode(g.prompt) + text, g.prompt + tokens
                logprobs = g.scores + logprobs
                top = [{} for _ in g.prompt] + top if top else top
            choice["text"] = text
            choice["logprobs"] = self._logprobs(tokens, logprobs, top)
            if self.request.return_token_ids:
                choice["prompt_token_ids"] = g.prompt
        if self.request.return_token_ids:
            choice["token_ids"] = g.tokens
        if g.scores:
            rows: list[Json | None] = [None]
            for token, logprob in zip(g.prompt[1:], g.scores[1:]):
                rows.append({str(token): {"logprob": logprob, "decoded_token": self._name(token)}})
            choice["prompt_logprobs"] = rows
        return choice

    def _logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[dict[int, float]],
    ) -> Json | None:
        """Return log-probabilities with the most probable tokens at each place. top: [] = none."""
        if self.request.logprobs is None or self.request.logprobs is False:
            return None
        places = zip(tokens, logprobs, top or [{} for _ in tokens])
        if self.chat:
            rows = []
            for token, logprob, best in places:
                others = [self._row(*other) for other in best.items()]
                rows.append(self._row(token, logprob) | {"top_logprobs": others})
            return {"content": rows, "refusal": None}
        names, offsets, tops, offset = [], [], [], 0
        for token, logprob, best in places:
            names.append(self._name(token))
            offsets.append(offset)
            offset += len(self.tokenizer.decode([token]))
            named = {self._name(other): x for other, x in best.items()}
            tops.append(None if logprob is None else named | {names[-1]: logprob})
        return {
            "tokens": names, "token_logprobs": logprobs, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip

    def _row(self, token: int, logprob: float | None) -> Json:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode("utf-8", "replace"))}

    def _name(self, token: int) -> str:
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.tokenizer.decode([token])

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self.head | {"object": kind, "choices": choices}

    def _usage(self, generated: Sequence[Generated]) -> Json:
        """Return the token counts. Each prompt counts once, even with several samples."""
        prompt = sum(len(g.prompt) for g in generated) // self.request.n
        completion = sum(len(g.tokens) for g in generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def error(message: str, code: str = "invalid_request_error") -> Json:
    """Return the body of an error answer."""
    return {"error": {"message": message[:MAX_MESSAGE], "type": code, "param": None, "code": code}}


def _thought(turn: toolcalls.ParsedTurn) -> Json:
    """Return the field with the thought of a turn, without its tags; none if it has no thought."""
    thought = turn.thought.removesuffix(toolcalls.END_THINK).strip()
    thought = thought.removeprefix(toolcalls.THINK).strip()
    return {"reasoning_content": thought} if thought else {}


def _call(call: toolcalls.Call) -> Json:
    return {
        "id": call.id or uuid.uuid4().hex[:9],  # as Mistral's templates ask for
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        },
    }
