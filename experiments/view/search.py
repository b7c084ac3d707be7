"""Full-text search in rollouts: an index of their words, kept beside the run in `.view/`, which may
be deleted.

SQLite's FTS5 stores for each word the rollouts that contain it, not the text: about a tenth of the
compressed files. The index grows in the background while a run goes on, and is made anew when files
that it covers have changed.
"""

import contextlib
import functools
import re
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from envs.values import Json
from experiments.view.runs import Run

LONGEST = 1 << 14  # characters of one text, such as an action, that are indexed
_WORD = re.compile(r"[^\W_]+")
_TABLES = """
    CREATE TABLE IF NOT EXISTS file (id INTEGER PRIMARY KEY, name, bytes, changed);
    CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='', detail=none,
        tokenize='unicode61 remove_diacritics 0');
"""
_ROWS = 1 << 20  # a row's id is its file's number times this, plus its place in the file


def text_of(record: Json) -> Iterator[str]:
    """Yield the texts of a rollout that are searched: query, experience, actions, observations,
    reasons, error."""
    yield from (record["query"], record["error"])
    yield from (experience["content"] for experience in record["experience"])
    for turn in record["turns"]:
        yield from (turn["action"], turn["reason"])
        yield from (str(message.get("content") or "") for message in turn["observation"])


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return (type, text) of everything that is defined in a database."""
    return set(connection.execute("SELECT type, sql FROM sqlite_master"))


@functools.cache
def _expected() -> set[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return _schema(connection)


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case; punctuation and underscores separate them."""
    return _WORD.findall(text.lower())


def words_in(record: Json) -> str:
    """Return the words of a rollout, each once."""
    texts = "\n".join(text[:LONGEST] for text in text_of(record))
    return " ".join(dict.fromkeys(words_of(texts)))


class Search:
    """The words of a run's rollouts. `grow` may be called again and again, by one thread at a time.

    wait: called before each file, to leave the processor to what is more urgent.
    """

    def __init__(self, run: Run, wait: Callable[[], None] = lambda: None):
        self._wait = wait
        self.run, self.done, self.of = run, 0, 0
        self.wrong: dict[str, str] = {}  # name of a file: why its words cannot be found
        self.stopped = threading.Event()
        self._temporary: str | None = None
        self._writing = threading.Lock()
        self.path = self._place()

    def _place(self) -> Path:
        folder = self.run.workdir / ".view"
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                place = folder / "words.sqlite"
            if folder.is_symlink() or place.is_symlink() or place.exists() > place.is_file():
                raise FileExistsError(place)  # it would be written somewhere else
            return place
        except OSError:  # somebody else's run
            self._temporary = tempfile.mkdtemp(prefix="evolver-view-")
            return Path(self._temporary) / "words.sqlite"

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=30)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA trusted_schema=OFF")  # it may have come with the folder
        connection.execute("PRAGMA synchronous=OFF")  # it can be made again
        if not _schema(connection) <= _expected():  # a view or a trigger might never end
            connection.close()
            raise sqlite3.DatabaseError(f"{self.path.name} is no index of words")
        connection.executescript(_TABLES)
        return connection

    def grow(self) -> None:
        """Index the files that are not yet indexed. Returns early after `close`."""
        with self._writing:
            try:
                self._grow()
            except sqlite3.DatabaseError:  # damaged, or of another program
                for path in self.path.parent.glob(f"{self.path.name}*"):
                    path.unlink(missing_ok=True)
                self._grow()

    def _grow(self) -> None:
        self.run.refresh()
        with contextlib.closing(self._open()) as connection:
            known = set(connection.execute("SELECT name, bytes, changed FROM file"))
            now = [(entry.file.path.name, *entry.signature) for entry in self.run.entries]
            if known - set(now):
                connection.executescript(f"DROP TABLE file; DROP TABLE words; {_TABLES}")
                known = set()
            self.of, self.done = len(now), len(known)
            for number, file in enumerate(now):
                if file not in known:
                    self._wait()
                    if self.stopped.is_set():
                        return
                    self.wrong.pop(file[0], None)
                    try:
                        with connection:
                            self._add(connection, number, file)
                        self.done += 1
                    except (OSError, LookupError, ValueError) as error:  # it is tried again
                        self.wrong[file[0]] = str(error)

    def _add(self, connection: sqlite3.Connection, number: int, file: tuple[str, int, int]) -> None:
        insert = "INSERT INTO file (name, bytes, changed) VALUES (?, ?, ?)"
        id = connection.execute(insert, file).lastrowid
        assert id is not None  # as after every insertion
        self.run.load([number])
        row = id * _ROWS
        for member in range(len(self.run.entries[number].described["members"])):
            found = [words_in(record) for record in self.run.records(number, member)]
            rows = enumerate(found, row)
            connection.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", rows)
            row += len(found)

    def find(self, text: str) -> Json:
        """Return {"files": {number of the file: rows}, "done", "of", "wrong"}: the rollouts that
        hold every word of `text`.

        A word also matches longer ones that begin with it. "done" of "of" files are indexed so far;
        "wrong" says why others cannot be.
        """
        words, wrong = words_of(text), list(self.wrong.values())
        answer: Json = {"files": {}, "done": self.done, "of": self.of, "wrong": wrong}
        if not words:
            return answer
        numbers = {entry.file.path.name: number for number, entry in enumerate(self.run.entries)}
        with contextlib.closing(self._open()) as connection:
            names = dict(connection.execute("SELECT id, name FROM file"))
            query = " AND ".join(f'"{word}"*' for word in words)
            select = "SELECT rowid FROM words WHERE words MATCH ?"
            for (row,) in connection.execute(select, (query,)):
                number = numbers.get(names.get(row // _ROWS, ""))
                if number is not None:
                    answer["files"].setdefault(number, []).append(row % _ROWS)
        return answer

    def close(self) -> None:
        """Stop growing, and delete an index that is not kept beside the run."""
        self.stopped.set()
        with self._writing:
            if self._temporary:
                shutil.rmtree(self._temporary, ignore_errors=True)
