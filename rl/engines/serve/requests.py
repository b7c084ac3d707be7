"""Requests of OpenAI's completions and chat completions, with vLLM's fields for token ids.

The models below declare every field that the server reads, with its bounds. A request with an
unsupported or unknown option is refused with the option's name; ignoring it would silently give a
wrong result.
"""

import difflib
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from envs.values import Json, loads
from models import chat
from models.tokenizer import Tokenizer, TokenizerError
from rl.seeds import seed_of
from rl.trajectory import Sampling

MAX_CHOICES, MAX_STOPS, MAX_TOP = 128, 16, 20
MAX_BODY = 32 << 20  # bytes
MAX_VALUES = 2**19  # of a body's JSON: a value takes much more memory than its text
Entry = TypeVar("Entry")
# A list of many wrong entries is one fault.
Many = Annotated[list[Entry], Field(fail_fast=True)]
# Unsupported options that would change the sample, with the value that has no effect. Null never
# has one; where null is the only such value, None stands here.
NEUTRAL: Json = {
    "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
    "min_p": 0, "suffix": "", "best_of": 1, "min_tokens": 0, "allowed_token_ids": None,
    "bad_words": [], "structured_outputs": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "functions": [], "function_call": "none",
    "use_beam_search": False, "use_audio": False, "logits_processors": [],
    "truncate_prompt_tokens": None, "include_stop_str_in_output": False,
    "skip_special_tokens": False, "spaces_between_special_tokens": True, "length_penalty": 1,
    "chat_template": None, "add_generation_prompt": True, "continue_final_message": False,
    "add_special_tokens": False, "documents": [], "modalities": ["text"], "audio": None,
    "prediction": None, "reasoning_effort": None, "verbosity": None, "web_search_options": None,
    "allowed_tokens": None, "return_token_strs": False, "parallel_tool_calls": True,
}  # fmt: skip
# Options that describe the caller or how the request is handled: the answer is the same without.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "priority", "request_id", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip


class Refused(ValueError):
    """A request that cannot be served; the message gives the reason. status: of the HTTP answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code = status, code


# --- validators -----------------------------------------------------------------------------------


def _listed(value: Any) -> Any:
    """Return [value] for one text or one list of token ids, and [] for an empty one."""
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [value]
    return value


def _top_of_text(logprobs: Any) -> Any:
    """Return the number that a boolean means in completions."""
    if isinstance(logprobs, bool):
        return 0 if logprobs else None
    return logprobs


def _text_of(content: Any) -> Any:
    """Return the text of a message's content, which may be null or a list of parts."""
    if not isinstance(content, list):
        return "" if content is None else content
    text = ""
    for part in content:
        known = isinstance(part, dict) and part.get("type", "text") == "text"
        if not known or not isinstance(part.get("text"), str):
            raise ValueError("only parts of type text are supported in a message's content")
        text += part["text"]
    return text


def _role_of(role: str) -> str:
    """Return the template's name of a role of OpenAI."""
    return {"developer": "system", "function": "tool"}.get(role, role)


def _object_of(arguments: Any) -> Any:
    """Return the arguments of a call, which clients send as JSON text."""
    return loads(arguments or "{}", "the JSON") if isinstance(arguments, str) else arguments


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named(tool: Json) -> Json:
    """Return a tool as it was given, because the prompt shows it with its keys in this order."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            'a tool must be {"type": "function", "function": {"name", "description", "parameters"}}'
        )
    return tool


# --- parts of requests ----------------------------------------------------------------------------


class Function(BaseModel):
    """The function of a tool call."""

    name: str
    arguments: Annotated[Json, BeforeValidator(_object_of)]


class ToolCall(BaseModel):
    """A tool call of an earlier turn."""

    function: Function


class Message(BaseModel):
    """A message of a conversation, in the form that `models.chat` renders. Other fields are left
    out."""

    role: Annotated[str, AfterValidator(_role_of)]
    content: Annotated[str, BeforeValidator(_text_of)] = ""
    reasoning_content: str | None = None
    tool_calls: Many[ToolCall] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts that the template writes, in no order."""
        arguments = [call.function.arguments for call in self.tool_calls or ()]
        return [self.content, self.reasoning_content or "", *map(_compact, arguments)]


class Fields(BaseModel):
    """An object in which a field that is null counts as absent, and an unknown field is refused."""

    model_config = ConfigDict(strict=True)
    neutral: ClassVar[Json] = {}
    harmless: ClassVar[set[str]] = set()

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, given: Any) -> Any:
        """Return the fields that are not null. Raises ValueError for the first one that would be
        ignored wrongly."""
        if not isinstance(given, dict):
            return given
        known = [field.alias or name for name, field in cls.model_fields.items()]
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            if name in known or name in cls.harmless:
                continue
            if name not in cls.neutral:
                name = name[:80]
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ValueError(f"{name} is unknown to this server{hint}: it would have no effect")
            if value != cls.neutral[name]:
                inner = f".{next(iter(value))}" if isinstance(value, dict) and value else ""
                raise ValueError(f"{name}{inner} is not supported by this server")
        return given


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False  # append an event with the usage


class TemplateOptions(Fields):
    """Options of the chat template."""

    enable_thinking: bool | None = None


class NamedSchema(Fields):
    """A JSON schema with a name."""

    schema_: Json = Field(alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(Fields):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Raise ValueError for a schema that is missing or has no effect."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type json_schema, and only with it")
        return self

    @property
    def wanted(self) -> Json | None:
        """The JSON schema of the answer, None if any text will do."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


# --- requests -------------------------------------------------------------------------------------


class Request(Fields):
    """A request to any route."""

    neutral = NEUTRAL
    harmless = HARMLESS
    model: str = ""  # the served name


class TextPrompt(Request):
    """A request with texts or token ids. Control tokens in texts are plain text."""

    prompt: Annotated[
        Many[str] | Many[Many[int]],
        BeforeValidator(_listed),
    ] = Field(
        min_length=1,
        max_length=MAX_CHOICES,
        description="a text, a list of texts, a list of token ids, or a list of such lists, at most"
        f" {MAX_CHOICES}",
    )

    def least(self, tokenizer: Tokenizer) -> int:
        """Return a number of tokens that the longest prompt has at least, without encoding."""
        return max(tokenizer.least(p) if isinstance(p, str) else len(p) for p in self.prompt)

    def prompts(self, tokenizer: Tokenizer) -> Iterator[list[int]]:
        """Yield the token ids of each prompt. Raises ChatError and TokenizerError."""
        for prompt in self.prompt:
            yield tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


class ChatPrompt(Request):
    """A request with a conversation, whose prompt is in the chat template and ends with the header
    of the next assistant turn."""

    messages: Many[Message] = Field(min_length=1)
    tools: Many[Annotated[Json, AfterValidator(_named)]] = []

    def least(self, tokenizer: Tokenizer) -> int:
        """As in `TextPrompt`."""
        texts: Iterable[str] = map(_compact, self.tools)
        for message in self.messages:
            texts = itertools.chain(texts, message.texts)
        return len(self.messages) + sum(map(tokenizer.least, texts))

    def prompts(self, tokenizer: Tokenizer) -> Iterator[list[int]]:
        """As in `TextPrompt`."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        yield chat.opening(tokenizer, messages, self.tools)


class TokenIds(Request):
    """A request to /detokenize."""

    tokens: Many[int]


class Generation(Request):
    """The options that completions and chat completions share."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)  # samples of each prompt
    max_tokens: NonNegativeInt | None = None
    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)] = Field(
        [],
        max_length=MAX_STOPS,
        fail_fast=True,
        description=f"a text or a list of at most {MAX_STOPS} texts",
    )  # texts that end a generation and are cut off
    stop_token_ids: Many[int] = Field([], description="a list of token ids")
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=0, description="0: only log-probabilities of the prompt tokens are available"
    )
    response_format: ResponseFormat = ResponseFormat(type="text")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # name tokens "token_id:7" in log-probabilities

    @property
    def top(self) -> int:
        """The number of the most probable tokens to return at each place."""
        return 0

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are returned."""
        return self.prompt_logprobs is not None

    @property
    def parses_tools(self) -> bool:
        """True if tool calls are extracted from the text."""
        return False

    @property
    def limit(self) -> int | None:
        """The tokens to generate; None = all that fit."""
        return self.max_tokens

    @model_validator(mode="after")
    def check(self) -> Self:
        """Raise ValueError for fields that do not go together."""
        if self.stream and self.scores_prompt:
            raise ValueError("log-probabilities of the prompt are not supported while streaming")
        if self.stream and self.top:
            raise ValueError(
                "the most probable tokens (logprobs) are not supported while streaming"
            )
        free = self.parses_tools or self.top or self.ignore_eos
        if free and self.response_format.wanted is not None:
            raise ValueError(
                "response_format is not supported together with tools, top_logprobs and ignore_eos"
            )
        return self

    def choices(
        self, prompts: Iterable[list[int]], tokenizer: Tokenizer, context: int
    ) -> list[tuple[list[int], Sampling]]:
        """Return (prompt, sampling) of each choice; without a seed, a random one is drawn.

        The first choice has the seed, the others have random numbers of their own, also for equal
        prompts. context: most tokens of prompt and generation together. Raises Refused.
        """
        least = 1 if self.limit is None else self.limit
        fitting = []
        for prompt in prompts:
            length = len(prompt)
            if length + least > context:
                raise too_long(
                    context,
                    f"you requested {length + least} tokens ({length} in the prompt, {least} in the"
                    " completion)",
                )
            fitting.append(prompt)
        limit = context - max(map(len, fitting)) if self.limit is None else self.limit
        ends = [] if self.ignore_eos else list(tokenizer.stops)
        seed = uuid.uuid4().int if self.seed is None else self.seed
        sampling = Sampling(
            max_tokens=limit,
            temperature=self.temperature,
            top_p=self.top_p or 1e-9,
            top_k=max(self.top_k, 0),
            stop_tokens=tuple(dict.fromkeys(ends + self.stop_token_ids)),
            seed=seed % 2**64,
        )
        choices = []
        for index, prompt in enumerate(fitting):
            for n in range(self.n):
                own = seed_of(sampling.seed, index, n) if index or n else sampling.seed
                choices.append((prompt, replace(sampling, seed=own)))
        return choices


class TextRequest(Generation, TextPrompt):
    """A request to /v1/completions."""

    max_tokens: NonNegativeInt | None = 16  # as OpenAI
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_top_of_text)] = Field(
        None, ge=0, le=MAX_TOP, description=f"a number between 0 and {MAX_TOP}"
    )

    @property
    def top(self) -> int:
        # 1 names the sampled tokens, as it always did
        return self.logprobs if self.logprobs and self.logprobs > 1 else 0

    @property
    def scores_prompt(self) -> bool:
        return super().scores_prompt or (self.echo and self.logprobs is not None)

    @model_validator(mode="after")
    def check_length(self) -> Self:
        """Raise ValueError if there is nothing to answer, or too much."""
        if self.limit == 0 and not self.echo:
            raise ValueError("max_tokens=0 without echo leaves nothing to answer")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(
                f"{len(self.prompt)} prompts with n={self.n} are more than {MAX_CHOICES} choices"
            )
        return self


class ChatRequest(Generation, ChatPrompt):
    """A request to /v1/chat/completions."""

    neutral = NEUTRAL | {"echo": False}
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    tool_choice: Literal["auto", "none"] = Field(
        "auto", description="auto or none: this server cannot force a tool call"
    )
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @property
    def top(self) -> int:
        return self.top_logprobs

    @property
    def parses_tools(self) -> bool:
        return bool(self.tools)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="before")
    @classmethod
    def leave_out_tools(cls, given: Any) -> Any:
        """Return the fields without the tools that the policy may not use."""
        if isinstance(given, dict) and given.get("tool_choice") == "none":
            return {name: value for name, value in given.items() if name != "tools"}
        return given

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        """Raise ValueError for tokens that have no place in the answer."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    def prompts(self, tokenizer: Tokenizer) -> Iterator[list[int]]:
        thinking = self.chat_template_kwargs.enable_thinking
        return super().prompts(tokenizer if thinking is None else tokenizer.with_thinking(thinking))


def fields_of(body: bytes, model: str) -> Json:
    """Return the fields of a body, a request to the model with this name. Raises Refused."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise Refused(f"the body has more than {MAX_VALUES:,} commas and brackets", 413)
    fields = loads(body, "the body")
    if not isinstance(fields, dict):
        raise Refused("the body is not a JSON object")
    asked = fields.get("model")
    if isinstance(asked, str) and asked != model:
        message = f"the model `{asked[:80]}` does not exist; this server has `{model}`"
        raise Refused(message, 404, "model_not_found")
    return fields


AnyRequest = TypeVar("AnyRequest", bound=Request)


def parse(kind: type[AnyRequest], fields: Json) -> AnyRequest:
    """Return the request with these fields. Raises Refused for the first one at fault."""
    try:
        return kind.model_validate(fields)
    except ValidationError as invalid:
        fault = invalid.errors()[0]
    reason, place = fault["msg"].removeprefix("Value error, "), fault["loc"]
    if not place:
        raise Refused(reason)
    given = json.dumps(fault["input"])[:80]
    meant = kind.model_fields[str(place[0])].description
    if meant:
        raise Refused(f"{place[0]} must be {meant}, not {given}")
    raise Refused(f"{'.'.join(map(str, place))}: {reason} (given: {given})")


def prompts_of(
    request: TextPrompt | ChatPrompt, tokenizer: Tokenizer, *, vocab: int, context: int
) -> Iterator[list[int]]:
    """Yield the token ids of the prompts, which are below `vocab`. Raises Refused, for a prompt
    that is certainly longer than the context before it is encoded."""
    least = request.least(tokenizer)
    if least > context:
        raise too_long(context, f"your prompt alone has {least} or more")
    try:
        for prompt in request.prompts(tokenizer):
            if not prompt:
                raise Refused("the prompt is empty")
            if min(prompt) < 0 or max(prompt) >= vocab:
                raise Refused(f"a prompt token is outside of the vocabulary 0..{vocab - 1}")
            yield prompt
    except (chat.ChatError, TokenizerError) as error:
        raise Refused(str(error)) from None


def too_long(context: int, reason: str) -> Refused:
    """Return the refusal of a request that does not fit into the context."""
    return Refused(
        f"This model's maximum context length is {context} tokens. However, {reason}.",
        code="context_length_exceeded",
    )
