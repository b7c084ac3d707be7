"""OpenAI-compatible servers over HTTP: requests, the records of their answers, and the errors that
they mean. Needs httpx (requirements/llm.txt)."""

import asyncio
import json
import math
import os
from collections.abc import Callable

import httpx

from envs import values
from envs.http import bearer, retry_after
from evolver.llm.questions import Call, ChatError, Json, Record, Role

RETRIABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # HTTP statuses
KEY_REFUSED = {401, 403}
NO_ROUTE = {404, 405}
LONG_PROMPT = ("context length", "context_length", "maximum context", "too long")
CONNECT = 30.0  # seconds to connect
PREFLIGHT = 20.0  # seconds of a check before the run
NO_PROXY = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_LARGEST = 1e15  # number in a vector; the norm of larger ones, like that of NaN, is no float32


class Servers:
    """All servers that a run asks. Deadlines are up to the caller.

    say: called with a line for the user.
    """

    def __init__(self, say: Callable[[str], None]):
        timeout = httpx.Timeout(None, connect=CONNECT)
        self.http = httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(), mounts=NO_PROXY)
        self._say = say
        self._without_schemas: set[str] = set()  # urls that refuse a response_format

    async def answer(self, call: Call) -> Record:
        """Return the record of an answer. Raises ChatError.

        A server that refuses a response_format is asked without it.
        """
        url = call.role.server
        if call.schema is None or url in self._without_schemas:
            return await self._post(call, call.body)
        form = {"name": "answer", "schema": call.schema}
        held = call.body | {"response_format": {"type": "json_schema", "json_schema": form}}
        try:
            return await self._post(call, held)
        except ChatError as error:
            if error.kind != "request":
                raise
        answer = await self._post(call, call.body)
        self._without_schemas.add(url)  # it answered once response_format was left out
        return answer

    async def problem(self, roles: dict[str, Role]) -> str:
        """Return what is wrong with the server of roles that share url, model and key, "" if
        nothing is: an unreachable url, an unknown model, a refused key, a small context."""
        role, *_ = roles.values()
        names = list(roles)
        most = max(role.max_tokens for role in roles.values())
        try:
            async with asyncio.timeout(PREFLIGHT):
                problem = await self._problem(role, names == ["embedder"], most)
        except TimeoutError:
            problem = f"no answer within {PREFLIGHT:g} s"
        except ChatError as error:
            problem = str(error)
        return problem and f"config.llm: {role.server} ({', '.join(names)}): {problem}"

    async def _problem(self, role: Role, embeds: bool, max_tokens: int) -> str:
        answer = await self._request("GET", role, "models")
        if answer.status_code in KEY_REFUSED:
            raise _refusal(answer, role.key)
        try:
            models = {entry["id"]: entry for entry in answer.json()["data"]}
        except MALFORMED:
            models = {}
        if not models:
            unlisted = f"GET {role.server}/models (HTTP {answer.status_code}) lists no models"
            return await self._problem_of_route(role, embeds, unlisted)
        if role.model not in models:
            some = ", ".join(map(repr, [*models][:8]))
            return f"there is no model {role.model!r}; it serves {some}"
        context = models[role.model].get("max_model_len")
        if isinstance(context, int) and context <= max_tokens:
            return (
                f"the context of {context} tokens leaves no room for a prompt with"
                f" max_tokens={max_tokens}"
            )
        return ""

    async def _problem_of_route(self, role: Role, embeds: bool, unlisted: str) -> str:
        """Return what is wrong with a server that lists no models, "" if it has the role's route.

        The request is empty, so every server refuses it or answers without generating.
        """
        route, content = ("embeddings", "input") if embeds else ("chat/completions", "messages")
        answer = await self._request("POST", role, route, {"model": role.model, content: []})
        if answer.status_code in KEY_REFUSED | NO_ROUTE:
            return (
                f"{unlisted}, and POST {role.server}/{route} is refused"
                f" ({_shown(answer, role.key)}); the url of an OpenAI-compatible server usually"
                " ends in /v1"
            )
        self._say(f"{unlisted}; continuing without checking that it serves {role.model!r}")
        return ""

    async def _post(self, call: Call, body: Json) -> Record:
        answer = await self._request("POST", call.role, call.route, body)
        if answer.status_code != 200:
            raise _refusal(answer, call.role.key)
        try:
            return _read(call, answer.json())
        except MALFORMED:
            what = "embedding" if call.is_embedding else "chat completion"
            text = f"the server's answer holds no {what}, or was cut"
            raise ChatError("bad_json", text, retriable=True, billed=True) from None

    async def _request(
        self, method: str, role: Role, route: str, body: Json | None = None
    ) -> httpx.Response:
        """Return the response, whatever its status. Raises ChatError for a key that cannot be sent
        and for a broken connection."""
        url = f"{role.server}/{route}"
        headers = _headers(role.key)
        # ASCII, because httpx cannot encode lone surrogates
        content = json.dumps(body) if body else None
        why = "the server cannot be reached"
        try:
            async with self.http.stream(method, url, headers=headers, content=content) as answer:
                why = "the answer was cut"
                await answer.aread()
                return answer
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            text = _redacted(f"{why}: {type(error).__name__}: {error}", role.key)
            billed = why == "the answer was cut"
            raise ChatError("connection", text, retriable=True, billed=billed) from None


def _read(call: Call, answer: Json) -> Record:
    """Return the record of a server's answer. Raises MALFORMED errors.

    Missing counts of tokens are estimated, so that they count towards the budget.
    """
    text = ""
    given = answer.get("usage") or {}
    if call.is_embedding:
        vector = [float(x) for x in answer["data"][0]["embedding"]]
        if not vector or not all(abs(x) < _LARGEST for x in vector):
            raise ValueError
        record: Record = {"vector": vector}
    else:
        choice = answer["choices"][0]
        text = values.text(choice["message"].get("content") or "")
        record = {"text": text, "finish": str(choice.get("finish_reason") or "stop")}
    sizes = {"prompt_tokens": len(json.dumps(call.body)), "completion_tokens": len(text.encode())}
    for name, size in sizes.items():
        count = record[name] = given.get(name)
        if type(count) is not int or count < 1:
            record[name] = math.ceil(size / 4)
            if size:
                record["estimated"] = True
    return record


def _refusal(answer: httpx.Response, key: str) -> ChatError:
    """Return the error that a response other than 200 means."""
    status = answer.status_code
    message = _shown(answer, key)
    if status in KEY_REFUSED:
        why = "the server requires a key; name its environment variable in config.llm.key"
        if key:
            why = f"the key in {key} is refused"
        return ChatError("key", f"{why} ({message})")
    if status == 404:
        return ChatError("model", f"the server has no such model or route ({message})")
    if status in RETRIABLE:
        after = retry_after(answer.headers.get("retry-after"))
        return ChatError(f"http_{status}", message, retriable=True, after=after)
    is_long = status == 413 or any(words in message.lower() for words in LONG_PROMPT)
    return ChatError("context" if is_long else "request", message)


def _shown(answer: httpx.Response, key: str) -> str:
    return _redacted(f"HTTP {answer.status_code}: {answer.text[:300]}", key)


def _headers(key: str) -> dict[str, str]:
    """Return the headers of a request. Raises ChatError if the key's variable holds none."""
    value = _secret(key)
    problem = ""
    if key and not value:
        problem = f"is not set; export {key}=... with the server's key"
    elif not value.isascii() or not value.isprintable():
        problem = "holds characters that are invalid in a key"
    if problem:
        raise ChatError("key", f"the environment variable {key} {problem}")
    return {"Content-Type": "application/json"} | bearer(value)


def _redacted(text: str, key: str) -> str:
    """Return the text without the key: servers tend to quote a key that they refuse."""
    value = _secret(key)
    return text.replace(value, f"<{key}>") if value else text


def _secret(key: str) -> str:
    """Return the value of the environment variable that holds a key."""
    return os.environ.get(key, "").strip()
