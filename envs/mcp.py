"""The tools of an MCP server as an environment without tasks.

Needs the official client: `pip install -r requirements/mcp.txt`. Tasks come from self-questioning,
and outcomes from a judge or from a task's verifier: probes, or the calls that it lists. A server
acts with its own permissions: run it under an account in which none of its tools can do harm.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import logging
import pathlib
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from envs import forked, packages, profile
from envs.mcp_results import shown
from envs.toolworld import SYSTEM, ToolWorld
from envs.values import Json, mapped
from envs.world import Task, Tool

RESETS = ("reset", "reset_all", "reset_environment", "reset_server", "reset_state", "reset_world")
RESTART = "restart_service"  # resets what has no other way (envs/openapi.py)
SNAPSHOTS = (("snapshot", "restore"), ("save_state", "load_state"))
FILES = "{files}"  # in a command or an environment variable: the server's directory
SHOWN = "/files"  # how the agent reads and writes its path, in every episode
_SHOWN = re.compile(rf"(?<![\w.~-]){SHOWN}(?![\w.-])")
CLOSING_S = 10.0  # until a server that does not end is left to end by itself
AGREED, COMPARED, MOST_KNOWN = 4, 8, 64  # episodes, calls in one of them, calls (see _Trust)
RESTARTS = 3  # after so many, the next one is expected
MAX_IDLE = 4  # servers of closed worlds that wait for the next world of this process


class _Printed(logging.Filter):
    """Tells once of lines that servers print among their messages, of each of which the client
    logs a traceback, and at the end how many there were."""

    lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        failed = record.exc_info and record.exc_info[1]
        if not (failed and hasattr(failed, "errors")):  # another message
            return True
        self.lines += 1
        record.msg = (
            f"an MCP server prints {failed.errors()[0]['input']!r:.80} to its standard output,"
            " which is for messages of the protocol: this line and others are ignored. Let it"
            " print to its standard error"
        )
        record.exc_info = None
        return self.lines == 1


_printed = _Printed()
_client_log = logging.getLogger("mcp.client.stdio")
_client_log.addFilter(_printed)


@atexit.register
def _close_idle() -> None:
    while McpWorld._idle:
        McpWorld._idle.pop()[1].close()
    _Spare.close_all()
    if _printed.lines > 1:
        _client_log.warning("lines that MCP servers printed and nobody read: %d", _printed.lines)


class McpWorld(ToolWorld):
    """One conversation with a server's tools. A turn without a call is the answer and ends the
    episode.

    A server is opened once and then brought back to its initial state by what it offers: nothing if
    the episode only called tools that the server declares to be read-only; the tool `reset_tool`;
    or a pair of SNAPSHOTS, of which the second takes what the first returned. These tools are not
    shown to the agent. Only a server without them is started again for each episode, unless it is
    `stateless`. Its instructions follow the system message.

    command: the command line of the server, as a list or a text, or the address of a running server
    (streamable HTTP), which is connected again instead of started. url: that address. env:
    environment variables of the command. timeout_s: deadline of one call and of starting.
    max_calls: calls allowed in one turn. reset_tool: the name of a tool that takes no arguments; ""
    = one of RESETS, if the server has it; None = no tool. log: the file to which the server's
    standard error is appended; "" = a temporary one, which the error of a failed start names.
    files: a directory of which each episode gets a new copy, the working directory of the server;
    FILES in the command or in `env` stands for its path, and the agent reads and writes SHOWN for
    it, because it is another one in each process. stateless: the server keeps nothing but
    these files, so that they are restored and the server goes on; None = found out (see _Trust).
    fork: a server that is a Python file, "python server.py", is run once up to its event loop and
    copied there for each start, which takes a tenth of the time (envs/forked.py).

    `tasks` is empty; `reset` takes any task with a query, with a verifier as in ToolWorld.
    """

    name = "mcp"
    _idle: list[tuple[Any, _Session]] = []

    def __init__(
        self,
        command: list[str] | str | None = None,
        url: str = "",
        env: dict[str, str] | None = None,
        system: str = SYSTEM,
        timeout_s: float = 30.0,
        max_calls: int = 8,
        reset_tool: str | None = "",
        log: str = "",
        files: str = "",
        stateless: bool | None = None,
        fork: bool = True,
    ):
        super().__init__(system, max_calls)
        if bool(command) == bool(url):
            raise ValueError("an MCP environment needs either a command or a url")
        if files and not pathlib.Path(files).is_dir():
            raise ValueError(f"files={files!r} of an MCP environment has to be a directory")
        if stateless and not files:
            raise ValueError("a stateless MCP server needs `files`, the directory that it works in")
        words = shlex.split(command) if isinstance(command, str) else list(command or [])
        if len(words) == 1 and re.match("https?://", words[0]):
            url = words.pop()
        if files and not words:
            raise ValueError("`files` needs a server that is started by a command, not an address")
        self._own_system = system
        variables = tuple(sorted((env or {}).items()))
        self._start = _Start(
            tuple(words), url, variables, timeout_s, reset_tool, log, files, stateless, fork
        )
        self._session: _Session | None = None

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "dev", "test"):
            raise ValueError(f"mcp has no split {split!r}; it has train, dev, test, all empty")
        return []

    def profile(self) -> Json:
        """Return a profile with the server as its only entity and the tools as operations."""
        session = self._session or self._connect()
        functions = [tool["function"] for tool in session.tools]
        return profile.profile_of(self.name, [profile.entity(session.server, functions)])

    def close(self) -> None:
        """Leave the server to the next world of this process if it can be reset, else end it."""
        session, self._session, self._task = self._session, None, None
        if session is None:
            return
        _Spare.of(self._start).close()
        if not session.resettable:
            session.close()
            return
        self._idle.append((self._start, session))
        if len(self._idle) > MAX_IDLE:
            self._idle.pop(0)[1].close()

    def _connect(self) -> _Session:
        """Return a connection to a server in its initial state."""
        session, self._session = self._session or self._waiting(), None
        if session is not None:
            as_new = False
            try:
                as_new = session.reset()
            finally:  # also where no new server starts, or the user ends the run
                if not as_new:
                    session.close()
            if as_new:
                self._session = session
                return session
        self._session = _Spare.of(self._start).open(self._start)
        return self._session

    def _waiting(self) -> _Session | None:
        for entry in list(self._idle):
            if entry[0] == self._start:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._idle.remove(entry)
                    return entry[1]
        return None

    def _open(self, task: Task, seed: int) -> list[Tool]:
        session = self._connect()
        self._system = "\n\n".join(filter(None, (self._own_system, session.instructions)))
        return session.tools

    def _call(self, name: str, arguments: Json) -> tuple[str, bool]:
        assert self._session, "no episode: reset the world first"
        return self._session.call(name, arguments)


@dataclass(frozen=True)
class _Start:
    """The way to a server: see McpWorld."""

    command: tuple[str, ...]
    url: str
    env: tuple[tuple[str, str], ...]
    timeout_s: float
    reset_tool: str | None
    log: str
    files: str
    stateless: bool | None
    fork: bool = False


class _Spare:
    """A server for the next episode, started while this one is played, where each one needs its
    own."""

    _all: ClassVar[dict[_Start, _Spare]] = {}
    _threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mcp-spare")

    def __init__(self) -> None:
        self.next: concurrent.futures.Future[_Session] | None = None
        self._lock = threading.Lock()  # one server is never given to two worlds
        self.opened = 0
        self.alone = False  # the server does not bear another one beside it

    @classmethod
    def of(cls, start: _Start) -> _Spare:
        return cls._all.setdefault(start, _Spare())

    def open(self, start: _Start) -> _Session:
        """Return a connection to a new server."""
        waiting, session = self._take(), None
        if waiting is not None:
            try:
                session = waiting.result()
            except Exception:
                self.alone = True
        session = session or _Session(start)
        with self._lock:
            self.opened += 1
            if self.opened >= RESTARTS and self.next is None and not (self.alone or start.url):
                self.next = self._threads.submit(_Session, start)
        return session

    def _take(self) -> concurrent.futures.Future[_Session] | None:
        with self._lock:
            waiting, self.next = self.next, None
        return waiting

    def close(self) -> None:
        """End the server that waits."""
        waiting = self._take()
        if waiting is not None and not waiting.cancel():
            with contextlib.suppress(Exception):
                waiting.result().close()

    @classmethod
    def close_all(cls) -> None:
        for spare in list(cls._all.values()):
            spare.close()


@dataclass
class _Trust:
    """The evidence on a server that may keep nothing but its files.

    The first call of an episode on a new server shows the initial state. A used server whose files
    were restored has to answer it alike. After AGREED episodes in which it did, it goes on, with
    one comparison per episode.
    """

    known: dict[str, str]  # first calls on new servers, [name, arguments] in JSON, and answers
    agreed: int = 0
    refuted: bool = False

    def learn(self, name: str, arguments: Json, answer: str) -> None:
        """Keep the answer to the first call on a new server."""
        if len(self.known) < MOST_KNOWN:
            self.known[json.dumps([name, arguments], sort_keys=True)] = answer

    def comparisons(self) -> list[tuple[str, str]]:
        """Return known calls with their answers: some until the server is trusted, then one at a
        time."""
        known = list(self.known.items())
        number = 1 if self.agreed >= AGREED else COMPARED
        return [known[(self.agreed + n) % len(known)] for n in range(min(number, len(known)))]


class _Session:
    """A connection to a server. The client is asynchronous and a World is not, so it runs in its
    own thread."""

    _trusts: ClassVar[dict[_Start, _Trust]] = {}

    def __init__(self, start: _Start):
        """Raises RuntimeError, with what can be done about it, if there is no connection in time,
        and ValueError if the server has no tool `reset_tool`."""
        self.tools: list[Tool] = []
        self.server = self.instructions = ""
        self._start, self._timeout_s = start, start.timeout_s
        self._reading: set[str] = set()  # tools that change nothing
        self._changed = False
        self._resetting: tuple[str, Json] | None = None  # a call
        self._new = True  # no call was made yet
        self._folder: pathlib.Path | None = None
        if start.files:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="mcp-files-")).resolve()
            self._restore_files()
        self._log = start.log
        if start.command and not start.log:
            self._log = tempfile.mkstemp(prefix="mcp-server-", suffix=".log")[1]
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        client = packages.load("mcp", "mcp").Client
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._serve(client))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self._opened.result(start.timeout_s)
            unfit = self._find_reset()
        except Exception as error:
            self.close()
            reason = _innermost(error)
            if isinstance(error, TimeoutError | concurrent.futures.TimeoutError):
                reason = f"no answer within {start.timeout_s:g} s"
            unusable = f"the MCP server cannot be used: {reason}{self._advice()}"
            raise RuntimeError(unusable) from error
        except BaseException:  # the user ends the run
            self.close()
            raise
        if unfit:
            self.close()
            raise ValueError(unfit)

    @property
    def resettable(self) -> bool:
        """True if `reset` needs no new server."""
        can = not self._changed or self._resetting is not None or self._start.stateless
        return self._thread.is_alive() and bool(can or self._may_be_stateless)

    @property
    def _may_be_stateless(self) -> bool:
        unknown = self._start.stateless is None and bool(self._start.files)
        return unknown and not self._trust.refuted

    @property
    def _trust(self) -> _Trust:
        return self._trusts.setdefault(self._start, _Trust({}))

    def reset(self) -> bool:
        """Bring the server back to its initial state; return False if that needs a new one."""
        if not self.resettable:
            return False
        if self._changed:
            self._changed = self._resetting is not None and not self._ask(*self._resetting)[1]
            self._restore_files()
            if self._resetting is None and not self._start.stateless:
                self._changed = not self._answers_as_new()
        return not self._changed

    def _answers_as_new(self) -> bool:
        """Return True if the server is known to keep nothing but its files, which were restored."""
        trust = self._trust
        for key, answer in trust.comparisons():
            call = json.loads(key)
            if self._ask(*call)[0] != answer:
                with contextlib.closing(_Session(self._start)) as new:
                    trust.refuted |= new._ask(*call)[0] == answer
                if not trust.refuted:  # the answer has the time in it, or chance
                    trust.known.pop(key, None)
                return False
            self._restore_files()
        trust.agreed += bool(trust.known)
        return bool(trust.known) and trust.agreed >= AGREED

    def call(self, name: str, arguments: Json) -> tuple[str, bool]:
        """Return the text of the result, and False if it is an error. Never raises."""
        if name not in {tool["function"]["name"] for tool in self.tools}:
            return f"error: there is no tool {name!r}", False
        self._changed |= name not in self._reading
        text, ok = self._ask(name, arguments)
        if self._new and self._may_be_stateless:
            self._trust.learn(name, arguments, text)
        self._new = False
        return text, ok

    def close(self) -> None:
        """End the connection, and the server if it was started for it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(min(self._timeout_s, CLOSING_S))
        if self._opened.done() and not self._opened.exception() and self._log != self._start.log:
            pathlib.Path(self._log).unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _restore_files(self) -> None:
        """Make the server's directory a copy of `files`. It stays the same directory, which the
        server works in."""
        if self._folder is None:
            return
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.copytree(self._start.files, self._folder, symlinks=True, dirs_exist_ok=True)

    def _ask(self, name: str, arguments: Json) -> tuple[str, bool]:
        folder = str(self._folder or SHOWN)
        given = mapped(arguments, lambda text: _SHOWN.sub(lambda _: folder, text))
        try:
            result = self._wait(self._client.call_tool(name, given))
        except Exception as error:
            self._changed = True  # as far as is known
            return f"error: {_innermost(error)}".replace(folder, SHOWN), False
        text = shown(result).replace(folder, SHOWN)
        return (f"error: {text}" if result.is_error else text or "(no output)"), not result.is_error

    def _wait(self, called: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine of the client. Raises what that raises, and TimeoutError
        for no answer in time."""
        try:
            future = asyncio.run_coroutine_threadsafe(called, self._loop)
        except RuntimeError:
            called.close()
            raise RuntimeError("the server has ended") from None
        try:
            return future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from None

    def _find_reset(self) -> str:
        """Find what brings the server back to its initial state, and hide it from the agent. Return
        what is wrong with `reset_tool`, "" if nothing is."""
        functions = {tool["function"]["name"]: tool["function"] for tool in self.tools}
        wanted = self._start.reset_tool
        free = [name for name in functions if not functions[name]["parameters"].get("required")]
        if wanted and wanted not in free:
            return (
                f"the MCP server has no tool {wanted!r} that resets it without arguments; without"
                f" arguments it has {', '.join(free) or 'none'}"
            )
        if wanted is None:
            self.tools = [tool for tool in self.tools if tool["function"]["name"] != RESTART]
            return ""
        found = [name for name in free if name in ([wanted] if wanted else RESETS)]
        hidden = {RESTART, *found[:1]}
        if found:
            self._resetting = found[0], {}
        for save, load in () if found else SNAPSHOTS:
            needed = functions[load]["parameters"].get("required", []) if load in functions else []
            if save in free and len(needed) == 1:
                state, ok = self._ask(save, {})
                if ok:
                    hidden |= {save, load}
                    self._resetting = load, {needed[0]: state}
        if RESTART in free and not self._resetting and not self._start.files:
            self._resetting = RESTART, {}
        self.tools = [tool for tool in self.tools if tool["function"]["name"] not in hidden]
        return ""

    @contextlib.contextmanager
    def _transport(self) -> Iterator[Any]:
        start = self._start
        if start.url:
            yield start.url
            return
        stdio = packages.load("mcp.client.stdio", "mcp")
        folder = str(self._folder or "")
        words = [word.replace(FILES, folder) for word in start.command]
        env = {name: value.replace(FILES, folder) for name, value in start.env}
        if start.fork:
            given = stdio.get_default_environment() | env
            words = forked.copying(words, given, here=self._folder is None)
        server = stdio.StdioServerParameters(
            command=words[0], args=words[1:], env=env or None, cwd=self._folder
        )
        with pathlib.Path(self._log).open("a", encoding="utf-8") as errors:
            yield stdio.stdio_client(server, errlog=errors)

    def _advice(self) -> str:
        if self._start.url:
            return f". Is a server running at {self._start.url}?"
        written = pathlib.Path(self._log).read_bytes()[-2000:].decode(errors="replace").strip()
        said = f" ends with:\n{written}" if written else " is empty"
        return (
            f". Run it by hand to see what it lacks: {shlex.join(self._start.command)}\n"
            f"Its standard error, in {self._log},{said}"
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _list_tools(self) -> None:
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            self.tools += [_tool(tool) for tool in page.tools]
            for tool in page.tools:
                if tool.annotations and tool.annotations.read_only_hint:
                    self._reading.add(tool.name)
            cursor = page.next_cursor
            if not cursor:
                break
        info = self._client.server_info
        self.server = info.name if info else "server"
        self.instructions = self._client.instructions or ""

    async def _serve(self, client: Any) -> None:
        wait = self._timeout_s
        try:
            with self._transport() as transport:
                async with client(transport, read_timeout_seconds=wait) as self._client:
                    await self._list_tools()
                    self._opened.set_result(None)
                    await asyncio.Event().wait()  # until `close` cancels this task
        except BaseException as error:
            # Raised in __init__; once the connection is open, each call reports its own.
            if not self._opened.done():
                if not isinstance(error, Exception):
                    error = RuntimeError("it was closed")
                self._opened.set_exception(error)


def _tool(tool: Any) -> Tool:
    parameters = {**tool.input_schema, "type": "object"}
    described = tool.description or tool.title or ""
    function = {"name": tool.name, "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def _innermost(error: BaseException) -> str:
    """Return the message of the first error inside the exception groups of asynchronous
    libraries."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
