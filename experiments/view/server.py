"""The pages on 127.0.0.1: static files, resources of runs as JSON, and a thread that indexes
words."""

import contextlib
import re
import sqlite3
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from experiments.view.runs import Run, encoded
from experiments.view.search import Search
from models.files import BrokenFile

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
EVERY = 3.0  # seconds between two looks for new rollouts to index
QUIET = (
    0.5  # seconds after a request for which the indexing thread leaves the processor to the pages
)


def resource(run: Run, search: Search | None, words: list[str], query: dict[str, str]) -> Any:
    """Return the resource of a run that a path names, as JSON values, or as bytes of JSON. Raises
    LookupError and ValueError if there is none, and OSError."""
    match words:
        case ["overview"]:
            return run.overview()
        case ["now"]:
            return run.now()
        case ["index"]:
            asked = [int(query.get(name, -1)) for name in ("first", "end", "generation")]
            return run.index_text(*asked)
        case ["rollouts", file, member]:
            return run.chunk(int(file), int(member))
        case ["tasks"]:
            return run.tasks()
        case ["tasks", number]:
            return run.task_details(int(number))
        case ["experience"]:
            return run.experience()
        case ["search"] if search is not None:
            return search.find(query.get("q", ""))
    raise LookupError("/".join(words))


class View(ThreadingHTTPServer):
    """A server of runs. It binds to 127.0.0.1 only and refuses requests that name another host."""

    daemon_threads = True

    def __init__(self, runs: list[Run], port: int = 0):
        self.asked = 0.0  # when a page last asked for something, or got it
        self._closing = threading.Event()
        self._indexer = threading.Thread(target=self._index, daemon=True)
        self.runs = runs
        self.searches: list[Search] = []  # before the port, which may be taken: it then closes
        super().__init__(("127.0.0.1", port), Handler)
        self.searches = [Search(run, self._wait_for_pages) for run in runs]
        self._indexer.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def _index(self) -> None:
        for run in self.runs:  # before a page asks for them; requests come in between
            with contextlib.suppress(OSError, ValueError, RecursionError):  # which its page tells
                run.refresh()
                for number in reversed(range(len(run.entries))):
                    if not self._closing.is_set() and number < len(run.entries):
                        run.load([number])
        while not self._closing.is_set():
            for search in self.searches:
                try:
                    search.grow()
                    search.wrong.pop("", None)
                except Exception as error:  # whatever it is, the pages tell it, and look again
                    search.wrong[""] = f"{type(error).__name__}: {error}"
            self._closing.wait(EVERY)

    def _wait_for_pages(self) -> None:
        while not self._closing.is_set() and time.monotonic() - self.asked < QUIET:
            self._closing.wait(0.05)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless a page was closed before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Stop the indexing thread and close the socket."""
        self._closing.set()
        for search in self.searches:
            search.close()
        if self._indexer.is_alive():
            self._indexer.join(timeout=30)
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests; nothing can be changed through it."""

    server: View
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        # A page elsewhere may have a name that was made to resolve to this machine.
        if host not in ("127.0.0.1", "localhost"):
            return self.tell(403, "this server answers to 127.0.0.1 only")
        parts = urlsplit(self.path)
        try:
            if parts.path.startswith("/api/"):
                self.server.asked = time.monotonic()
                found = self.api(parts.path[5:].split("/"), parts.query)
                body = found if isinstance(found, bytes) else encoded(found)
                self.server.asked = time.monotonic()
                return self.reply(200, body, "application/json")
            name = parts.path.lstrip("/") or "index.html"
            if re.fullmatch(r"\w+\.(html|css|js)", name) and (STATIC / name).is_file():
                return self.reply(200, (STATIC / name).read_bytes(), TYPES[Path(name).suffix])
            self.tell(404, "there is no such page")
        except (OSError, sqlite3.Error, BrokenFile) as error:
            self.tell(500, f"it cannot be read: {error}")
        except (LookupError, ValueError) as error:
            self.tell(404, f"there is no such thing: {error}")
        except Exception as error:  # a defect of this program: the page and the terminal show it
            traceback.print_exc()
            self.tell(500, f"this program failed: {type(error).__name__}: {error}")

    def api(self, words: list[str], query: str) -> Any:
        runs, searches = self.server.runs, self.server.searches
        match words:
            case ["runs"]:
                return [{"name": run.name, "path": str(run.workdir.path)} for run in runs]
            case ["states"]:
                indexed = [[search.done == search.of, len(search.wrong)] for search in searches]
                return [run.state() + words for run, words in zip(runs, indexed)]
            case ["run", number, *rest] if int(number) in range(len(runs)):
                asked = {key: values[0] for key, values in parse_qs(query).items()}
                return resource(runs[int(number)], searches[int(number)], rest, asked)
        raise LookupError("/".join(words))

    def tell(self, status: int, message: str) -> None:
        self.reply(status, message.encode("utf-8", "replace"), "text/plain")

    def reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal shows the address only."""
