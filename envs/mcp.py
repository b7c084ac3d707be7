"""The tools of an MCP server as an environment without tasks.

Needs the official client: `pip install -r requirements/mcp.txt`. Tasks come from self-questioning,
and outcomes from a judge or from a task's verifier: probes, or the calls that it lists. A server
acts with its own permissions: run it under an account in which none of its tools can do harm.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from typing import Any

from envs import packages, profile
from envs.toolcalls import parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, Tool, World

SYSTEM = "You have tools. Use them to do what the user asks, then answer in words, without a call."


class McpWorld(World):
    """One conversation with a server's tools. A turn without a call is the answer and ends the
    episode.

    command: the command line of the server, as a list; each episode starts a new server, whose
    state in memory is
    empty. url: a running server (streamable HTTP) instead, whose state persists. env: environment
    variables of the
    command. timeout_s: deadline of one call and of starting. max_calls: calls allowed in one turn.

    `tasks` is empty; `reset` takes any task with a query. A verifier {"calls": [{"name",
    "arguments"}, ...]} requires these calls, in any order, each answered without an error. Without
    a verifier the score is 0 and a judge decides.
    """

    name = "mcp"

    def __init__(
        self,
        command: list[str] | None = None,
        url: str = "",
        env: dict[str, str] | None = None,
        system: str = SYSTEM,
        timeout_s: float = 30.0,
        max_calls: int = 8,
    ):
        if bool(command) == bool(url):
            raise ValueError("an MCP environment needs either a command or a url")
        self._command, self._url, self._env = list(command or []), url, env
        self._system, self._timeout_s, self._max_calls = system, timeout_s, max_calls
        self._session: _Session | None = None
        self._task: Task | None = None

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "dev", "test"):
            raise ValueError(f"mcp has no split {split!r}; it has train, dev, test, all empty")
        return []

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Open a new connection. Raises RuntimeError if the server cannot be reached or started."""
        calls = task.verifier.get("calls", [])
        if not isinstance(calls, list) or not all(
            isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls
        ):
            raise ValueError(
                f"task {task.id}: an MCP verifier is {{'calls': [{{'name', 'arguments'}}, ...]}}"
            )
        session = self._connect()
        self._task, self._required, self._over = task, calls, False
        self._succeeded: list[dict[str, Any]] = []
        messages = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": task.query},
        ]
        return Observation(messages, session.tools)

    def step(self, action: str) -> StepResult:
        """Run the turn's calls. `info["calls"]` lists them in order, each with "result" and "ok"
        (False = error)."""
        session = self._require_episode()
        if self._over:
            return StepResult([], terminated=True, info={"calls": [], "errors": 0, "over": True})
        messages, info = run_calls(parse(action), session.call, self._max_calls)
        done = [call for call in info["calls"] if call["ok"]]
        self._succeeded += [{"name": call["name"], "arguments": call["arguments"]} for call in done]
        self._over = not messages
        reward = self.evaluate().score if self._over else 0.0
        return StepResult(messages, reward=reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        self._require_episode()
        unmatched = list(self._succeeded)
        matched = 0
        for required in self._required:
            call = {"name": required["name"], "arguments": required["arguments"]}
            if call in unmatched:
                unmatched.remove(call)
                matched += 1
        success = bool(self._required) and matched == len(self._required)
        return Evaluation(
            float(success), success, {"progress": matched / max(len(self._required), 1)}
        )

    def profile(self) -> dict[str, Any]:
        """Return a profile with the server as its only entity and the tools as operations."""
        session = self._session or self._connect()
        functions = [tool["function"] for tool in session.tools]
        return {
            "name": self.name,
            "entities": [profile.entity(session.server, functions)],
            "task_preference": {**profile.PREFERENCE, "num_entities": 1},
        }

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = self._task = None

    def _connect(self) -> _Session:
        self.close()
        mcp = packages.load("mcp", "mcp")
        server = self._url
        if self._command:
            server = mcp.StdioServerParameters(
                command=self._command[0], args=self._command[1:], env=self._env
            )
        self._session = _Session(mcp.Client, server, self._timeout_s)
        return self._session

    def _require_episode(self) -> _Session:
        if self._task is None or self._session is None:
            raise RuntimeError("no episode: reset the world first")
        return self._session


class _Session:
    """A connection to a server. The client is asynchronous and a World is not, so it runs in its
    own thread."""

    def __init__(self, client: Any, server: Any, timeout_s: float):
        self.tools: list[Tool] = []
        self.server = ""
        self._timeout_s = timeout_s
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(client, server)), daemon=True
        )
        self._thread.start()
        try:
            self._opened.result(timeout_s)
        except Exception as error:
            self.close()
            reason = (
                f"no answer within {timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else _innermost(error)
            )
            raise RuntimeError(f"the MCP server cannot be used: {reason}") from error

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of the result, and False if it is an error. Never raises."""
        if name not in {tool["function"]["name"] for tool in self.tools}:
            return f"error: there is no tool {name!r}", False
        future = asyncio.run_coroutine_threadsafe(
            self._client.call_tool(name, arguments), self._loop
        )
        try:
            result = future.result(self._timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            future.cancel()
            return f"error: no answer within {self._timeout_s:g} s", False
        except Exception as error:
            return f"error: {_innermost(error)}", False
        text = "\n".join(_text(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content)
        return (f"error: {text}" if result.is_error else text or "(no output)"), not result.is_error

    def close(self) -> None:
        """End the connection, and the server if it was started for it."""
        if self._thread.is_alive() and hasattr(self, "_closing"):
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(self._timeout_s)

    async def _serve(self, client: Any, server: Any) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with client(server, read_timeout_seconds=self._timeout_s) as self._client:
                cursor = None
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    self.tools += [_tool(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if not cursor:
                        break
                info = self._client.server_info
                self.server = info.name if info else "server"
                self._opened.set_result(None)
                await self._closing.wait()
        except (
            BaseException
        ) as error:  # raised in __init__; once the connection is open, each call reports its own
            if not self._opened.done():
                self._opened.set_exception(
                    error if isinstance(error, Exception) else RuntimeError(str(error))
                )


def _tool(tool: Any) -> Tool:
    parameters = {**tool.input_schema, "type": "object"}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _text(block: Any) -> str:
    return (
        block.text
        if getattr(block, "type", "") == "text"
        else f"[{getattr(block, 'type', 'content')}]"
    )


def _innermost(error: BaseException) -> str:
    """Return the message of the first error inside the exception groups of asynchronous
    libraries."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
