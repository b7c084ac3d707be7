"""Questions to language models and their answers: roles, questions, replies and errors."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from envs.values import Json
from evolver.llm.answers import Schema, Unreadable, read_json
from evolver.processes.interrupt import RunEnds

CURRENT_POLICY = "policy"
INITIAL_POLICY = "policy:initial"
CUT = ("content_filter", "abort", "error")  # why an answer is not whole, besides "length"
SERVED = "served"  # url of a role, or of the world, that the run serves itself
POLICY_URLS = (CURRENT_POLICY, INITIAL_POLICY)  # urls of roles that an engine of this run answers
# What is cached of an answer: prompt_tokens, completion_tokens, estimated=True where they are, and
# either the fields of a Reply, or the vector of an embedding.
Record = Json


class BudgetSpent(RunEnds):
    """The budget of money or tokens is spent."""


class ServerDown(RunEnds):
    """A server refuses the key or the model, or too many questions in a row have failed."""


class ChatError(RuntimeError):
    """A question without an answer, counted under `kind`.

    after: the seconds of a Retry-After header. billed: True if the server may have generated an
    answer, although none arrived.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        retriable: bool = False,
        after: float | None = None,
        billed: bool = False,
    ):
        super().__init__(message)
        self.kind = kind
        self.retriable = retriable
        self.after = after
        self.billed = billed

    def __reduce__(self) -> Any:  # between processes, where it is never asked again
        return ChatError, (self.kind, str(self))


@dataclass(frozen=True)
class Role:
    """The server, model and sampling of one role.

    key: the environment variable that holds the key; "" = none. extra: more fields of the request,
    as a JSON object.
    """

    url: str
    model: str
    key: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    extra: str = ""

    @property
    def server(self) -> str:
        """The url without a slash at its end."""
        return self.url.rstrip("/")

    @property
    def is_policy(self) -> bool:
        """True if an engine of this run answers the role's questions."""
        return self.url in POLICY_URLS

    def sampling(self, seed: int | None) -> Json:
        """Return the sampling fields of a request."""
        body = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        if seed is not None:
            body["seed"] = seed % 2**31
        return body | json.loads(self.extra or "{}")


@dataclass(frozen=True)
class Question:
    """One question to a role. `version` is that of the prompt; `seed` distinguishes questions with
    the same wording. `about` is for whoever reads `Chat.said`: the `Trajectory.name` of the
    rollout, or the id of the task, that the question is about."""

    role: str
    messages: Sequence[Json]
    schema: Schema | None = None
    version: str = ""
    seed: int | None = None
    about: str = ""


@dataclass
class Reply:
    """An answer. `parsed` is its JSON value if the question had a schema."""

    text: str
    parsed: Any = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = "stop"  # "stop" | "length" | any other finish_reason of the server
    cached: bool = False
    estimated: bool = False  # the server did not count the tokens
    # Of an engine of this run, so that the answer can train (`evolver.llm.policy.trajectory_of`):
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # [] = unknown, see `Completion`
    version: int = -1  # of the weights


@dataclass(frozen=True)
class Said:
    """An answer of the current policy: `usable` if it could be read. `key` tells equal questions to
    other weights apart, and `about` is what those that this one answer stands for are about. `held`
    is False for an answer that was free to miss its schema, see `Chat.free`."""

    question: Question
    reply: Reply
    usable: bool
    key: str
    about: tuple[str, ...] = ()
    held: bool = True


@dataclass(frozen=True)
class Call:
    """A question as a server is asked it: a chat completion, or the embedding of `input`.

    weights: names those of the engine of this run that answers, "" for any other server. held:
    False for an answer that must follow the schema by itself.
    """

    name: str  # of the role
    role: Role
    body: Json
    schema: Schema | None = None
    version: str = ""
    weights: str = ""
    held: bool = True

    @property
    def is_embedding(self) -> bool:
        """True if the answer is a vector."""
        return "input" in self.body

    @property
    def route(self) -> str:
        """The route of the request."""
        return "embeddings" if self.is_embedding else "chat/completions"

    @functools.cached_property
    def key(self) -> str:
        """A text that only equal questions share: the key of their answer in the cache."""
        content: Json = {"body": self.body, "schema": self.schema, "version": self.version}
        if self.weights:
            content["weights"] = self.weights
        if not self.held:
            content["held"] = False
        return json.dumps(content, sort_keys=True)

    def parse(self, record: Record) -> Any:
        """Return the value in an answer: a vector, JSON that fits the schema, or None without one.

        Raises Unreadable for an answer that cannot be used.
        """
        if self.is_embedding:
            return record["vector"]
        text = record["text"]
        why = record["finish"]
        if why == "length" or (why in CUT and text.strip()):
            where = f"at max_tokens={self.role.max_tokens}" if why == "length" else f"by {why}"
            raise Unreadable("cut", f"the answer was cut {where}")
        if self.schema is not None:
            asked = [m.get("content") for m in self.body["messages"] if m.get("role") == "user"]
            return read_json(text, self.schema, prompt="\n".join(map(str, asked)))
        if not text.strip():
            raise Unreadable("empty", "the answer is empty")
        return None

    def is_usable(self, record: Any) -> bool:
        """Return True if something is a record whose answer can be used."""
        try:
            self.parse(record)
        except (Unreadable, KeyError, TypeError):
            return False
        return True


def url_problem(url: str, example: str = "http://127.0.0.1:8000/v1") -> str:
    """Return what is wrong with a server's URL, "" if nothing is."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises ValueError if it is none)
    except ValueError as error:
        return f"is not a URL such as {example} ({error})"
    if parts.username or parts.password:
        return "contains a user name or a password; put the key into an environment variable"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"is not a URL such as {example}"
    return ""
