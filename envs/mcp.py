"""The tools of an MCP server as an environment that comes without tasks.

Needs `pip install -r requirements/mcp.txt`, the official client. What there is to do is found by self-questioning, and
outcomes come from a judge, or from the calls a task's verifier asks for. A server is a program of its own with whatever
rights it has: give it an account where nothing it does can hurt.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import json
import threading
from typing import Any

from envs import profile
from envs.toolcalls import parse
from envs.world import Evaluation, Observation, StepResult, Task, Tool, World

SYSTEM = "You have tools. Use them to do what the user asks, then answer in words, without a call."


class McpWorld(World):
    """One conversation over a server's tools. A turn without a call is the answer and ends the episode.

    command: the server to start, as a list of words, anew for each episode, so that state it keeps in memory starts
    afresh; or url: a running server (streamable HTTP), whose state lasts. env: environment variables for the command.
    timeout_s: for one call, and for starting. max_calls: in one turn; calls beyond it are refused.

    `tasks` is empty. `reset` takes any task with a query. A verifier {"calls": [{"name", "arguments"}, ...]} asks for
    these calls, in any order, each answered without an error; without one the score is 0 and left to a judge.
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
        """Connect anew. Raises RuntimeError where the server cannot be reached or started."""
        calls = task.verifier.get("calls", [])
        if not isinstance(calls, list) or not all(
            isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls
        ):
            raise ValueError(f"task {task.id}: an MCP verifier is {{'calls': [{{'name', 'arguments'}}, ...]}}")
        self._connect()
        self._task, self._wanted, self._done, self._over = task, calls, [], False
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": task.query}]
        return Observation(messages, self._session.tools)

    def step(self, action: str) -> StepResult:
        """`info["calls"]` are the calls in order, each with its "result" and whether it was "ok"."""
        self._running()
        if self._over:
            return StepResult([], terminated=True, info={"calls": [], "errors": 0, "over": True})
        turn = parse(action)
        calls, messages = [], []
        for call in turn.calls[: self._max_calls]:
            text, ok = self._session.call(call.name, call.arguments)
            calls.append({**call.to_dict(), "result": text, "ok": ok})
            messages.append({"role": "tool", "name": call.name, "content": text})
        self._done += [{"name": call["name"], "arguments": call["arguments"]} for call in calls if call["ok"]]
        refused = list(turn.errors)
        if len(turn.calls) > self._max_calls:
            refused.append(f"{self._max_calls} calls a turn at most")
        messages += [{"role": "tool", "content": f"error: {text}"} for text in refused]
        self._over = not messages
        return StepResult(
            messages=messages,
            reward=self.evaluate().score if self._over else 0.0,
            terminated=self._over,
            info={
                "calls": calls,
                "errors": len(refused) + sum(not call["ok"] for call in calls),
                "parse_error": bool(turn.errors),
            },
        )

    def evaluate(self) -> Evaluation:
        self._running()
        left = list(self._done)
        found = 0
        for call in self._wanted:
            wanted = {"name": call["name"], "arguments": call["arguments"]}
            if wanted in left:
                left.remove(wanted)
                found += 1
        success = bool(self._wanted) and found == len(self._wanted)
        return Evaluation(float(success), success, {"progress": found / max(len(self._wanted), 1)})

    def profile(self) -> dict[str, Any]:
        """The server as the one entity, its tools as operations."""
        if self._session is None:
            self._connect()
        functions = [tool["function"] for tool in self._session.tools]
        return {
            "name": self.name,
            "entities": [profile.entity(self._session.server, functions)],
            "task_preference": {**profile.PREFERENCE, "num_entities": 1},
        }

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = self._task = None

    def _connect(self) -> None:
        self.close()
        mcp = importlib.import_module("mcp")
        server = self._url
        if self._command:
            server = mcp.StdioServerParameters(command=self._command[0], args=self._command[1:], env=self._env)
        self._session = _Session(mcp.Client, server, self._timeout_s)

    def _running(self) -> None:
        if self._task is None:
            raise RuntimeError("no episode: reset the world first")


class _Session:
    """A connection, on an event loop in a thread of its own: the client is asynchronous and a World is not."""

    def __init__(self, client: Any, server: Any, timeout_s: float):
        self.tools: list[Tool] = []
        self.server = ""
        self._timeout_s = timeout_s
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(client, server)), daemon=True)
        self._thread.start()
        try:
            self._opened.result(timeout_s)
        except Exception as error:
            self.close()
            said = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else _innermost(error)
            raise RuntimeError(f"the MCP server cannot be used: {said}") from error

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The text of the result and whether it is one. Never raises."""
        if name not in {tool["function"]["name"] for tool in self.tools}:
            return f"error: there is no tool {name!r}", False
        future = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, arguments), self._loop)
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
        """End the connection and a server that was started for it."""
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
        except BaseException as error:  # handed to whoever waits; afterwards calls fail by themselves
            if not self._opened.done():
                self._opened.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


def _tool(tool: Any) -> Tool:
    parameters = {**tool.input_schema, "type": "object"}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _text(block: Any) -> str:
    return block.text if getattr(block, "type", "") == "text" else f"[{getattr(block, 'type', 'content')}]"


def _innermost(error: BaseException) -> str:
    """What went wrong, out of the groups in which asynchronous libraries wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
