"""Copies of a Python program: they behave as the program would if it were started."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from envs import forked
from tests.envs.test_process import all_end, is_running, wait_until

ENV = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def program(folder, text, name="program.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


@pytest.fixture(autouse=True)
def ended():
    yield
    forked._end()


def ran(words):
    """Return what a copy of a program does without input."""
    copy = forked.copying(words, ENV)
    return subprocess.run(copy, input=b"", capture_output=True, env=ENV)


def both(words, *arguments, **options):
    """Return what a program does when it is started, and as a copy."""
    copy = forked.copying([*words, *arguments], ENV)
    assert copy != [*words, *arguments]
    started = subprocess.run([*words, *arguments], capture_output=True, env=ENV, **options)
    return started, subprocess.run(copy, capture_output=True, env=ENV, **options)


def test_a_copy_has_the_streams_arguments_folder_and_code_of_its_command(tmp_path):
    (tmp_path / "beside.py").write_text("count = [0]\n")
    words = program(
        tmp_path,
        """
        import atexit, os, sys
        import beside
        beside.count[0] += 1
        atexit.register(lambda: print("closed"))
        print(__name__, sys.argv[1:], os.getcwd(), beside.count, os.environ.get("COLOUR"))
        print(sys.stdin.read().upper(), file=sys.stderr)
        sys.exit(3)
        """,
    )
    for _ in range(2):  # the second is a copy of what the first one was copied from
        started, copy = both(words, "a b", "--c", input=b"ann", cwd=tmp_path)
        assert copy.stdout == started.stdout and b"['a b', '--c']" in copy.stdout
        assert copy.stderr == started.stderr == b"ANN\n" and copy.returncode == 3


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys\nsys.exit('no key')", 1, b"no key"),
        ("1 / 0", 1, b"ZeroDivisionError"),
        ("", 0, b""),
    ],
)
def test_a_program_ends_as_it_would(tmp_path, text, code, said):
    started, copy = both(program(tmp_path, text), stdin=subprocess.DEVNULL)
    assert copy.returncode == started.returncode == code
    assert said in copy.stderr and said in started.stderr


def test_chance_differs_between_copies(tmp_path):
    words = program(tmp_path, "import random\nprint(random.random())\n")
    copy = forked.copying(words, ENV)
    assert len({subprocess.check_output(copy) for _ in range(3)}) == 3


def test_a_copy_ends_with_its_command(tmp_path):
    words = program(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    command = subprocess.Popen(forked.copying(words, ENV, here=False), stdout=subprocess.PIPE)
    number = int(command.stdout.readline())
    assert is_running(number)
    command.send_signal(signal.SIGKILL)
    command.wait()
    assert all_end(number)


def test_nothing_stays_where_the_process_that_starts_copies_is_killed(tmp_path):
    words = program(tmp_path, "import os, sys\nprint(os.getpid(), flush=True)\nsys.stdin.read()\n")
    starting = f"""
        import subprocess
        from envs import forked
        copy = forked.copying({words!r}, {ENV!r})
        print(copy[4], flush=True)
        subprocess.Popen(copy, stdin=subprocess.PIPE).wait()
        """
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(starting)], stdout=subprocess.PIPE, text=True
    )
    place, number = Path(starter.stdout.readline().strip()), int(starter.stdout.readline())
    assert place.exists()
    starter.kill()
    starter.wait()
    assert all_end(number) and wait_until(lambda: not place.parent.exists())


LATE = """
import sys
def work():
    import {late}
print("{late}" in sys.modules)
work()
"""


@pytest.mark.parametrize(
    "text, begun_with", [("", True), ("opened = open(__file__)", False), ("1 / 0", False)]
)
def test_later_copies_begin_with_what_earlier_ones_have_imported(tmp_path, text, begun_with):
    installed, folder = tmp_path / "site-packages", tmp_path / "own"
    installed.mkdir()
    folder.mkdir()
    (installed / "late.py").write_text(f"if True:\n    {text or 'pass'}\n")
    (folder / "beside.py").write_text("")
    env = ENV | {"PYTHONPATH": str(installed)}
    for late, expected in (("late", begun_with), ("beside", False)):
        words = program(folder, LATE.format(late=late), f"{late}_is_imported.py")
        said = [subprocess.run(forked.copying(words, env), stdout=-1).stdout for _ in range(4)]
        assert said == [b"False\n"] * 2 + [f"{expected}\n".encode()] * 2


def test_an_installed_command_is_copied(tmp_path):
    script = Path(
        program(tmp_path, f"#!{sys.executable}\nimport sys; print(sys.argv[1:])", "say")[1]
    )
    script.chmod(0o755)
    env = ENV | {"PATH": str(tmp_path)}
    copy = forked.copying(["say", "hello"], env)
    assert copy != ["say", "hello"] and subprocess.check_output(copy) == b"['hello']\n"


def test_a_module_is_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = "import sys\nprint(__name__, __package__, sys.argv, sys.path[0])\n"
    (tmp_path / "shop" / "till").mkdir(parents=True)
    (tmp_path / "shop/__init__.py").write_text("print('opened')\n")
    (tmp_path / "shop/till/__init__.py").write_text("money = 7\n")
    (tmp_path / "shop/till/__main__.py").write_text(f"from . import money\n{says}print(money)\n")
    (tmp_path / "shop/desk.py").write_text(says)
    for name in ("shop.till", "shop.desk", "calendar"):
        started, copy = both([sys.executable, "-m", name], "2026")
        assert copy.stdout == started.stdout and copy.returncode == started.returncode == 0
    words = [sys.executable, "-m", "shop.closed"]
    assert forked.copying(words, ENV) == words


@pytest.mark.parametrize(
    ("prefix", "path", "beside"),
    [
        ("/usr", "/usr/src/app/state.py", True),
        ("/usr/src/app/.venv", "/usr/src/app/state.py", True),
        ("/usr/src/app/.venv", "/usr/src/app/.venv/lib/package.py", False),
        ("/usr", "/usr/src/application/state.py", False),
    ],
)
def test_an_environment_beside_a_program_is_no_code_of_it(monkeypatch, prefix, path, beside):
    monkeypatch.setattr(sys, "prefix", prefix)
    assert forked._is_beside(path, "/usr/src/app") == beside


def test_a_lost_socket_is_made_again(tmp_path):
    words = program(tmp_path, "print('ran')\n")
    first = forked.copying(words, ENV)
    Path(first[4]).unlink()
    second = forked.copying(words, ENV)
    assert first != second and subprocess.check_output(second) == b"ran\n"


def test_what_cannot_be_copied_is_started(tmp_path):
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "busy.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    env = ENV | {"PYTHONPATH": str(installed)}
    folder = tmp_path / "own"
    folder.mkdir()
    for words in (
        ["node", "server.js"],
        [sys.executable, "-m", "server"],
        [sys.executable, str(folder / "missing.py")],
        program(folder, "import (", "broken.py"),
        program(folder, "import busy", "threads.py"),
    ):
        assert forked.copying(words, env) == words
    fine = program(folder, "import json\n")
    assert forked.copying(fine, env) != fine


SERVER = """
import asyncio, os, random, sys
started, numbers, state = os.getpid(), random.random(), {{"calls": 0}}
{top}
async def main():
    state["calls"] += 1
    same = os.getpid() == started
    print(state["calls"], same, random.random(), sys.argv[1:], sys.stdin.read(), flush=True)

asyncio.run(main())
sys.exit(4)
"""


def served(tmp_path, top, *arguments):
    words = [*program(tmp_path, SERVER.format(top=top)), *arguments]
    shown = []
    for _ in range(3):
        copy = forked.copying(words, ENV)
        assert copy != words
        done = subprocess.run(copy, capture_output=True, env=ENV, input=b"asked")
        assert done.returncode == 4, done.stderr
        shown.append(done.stdout.decode().split())
    assert len({numbers for *_, numbers, _, _ in shown}) == 3
    assert all(calls[-4:][0] != "0" for calls in shown)
    return shown


def test_a_server_is_copied_where_its_event_loop_begins(tmp_path):
    for calls, same, _, arguments, asked in served(tmp_path, "", "--here"):
        assert (calls, same, arguments, asked) == ("1", "False", "['--here']", "asked")


@pytest.mark.parametrize(
    "top",
    [
        "open('beside.txt')",
        "open(os.path.join(os.environ['HOME'], '.copied-test'), 'a')",
        "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()",
        "import sqlite3; sqlite3.connect('beside.db')",
        "import socket; kept = socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "os.makedirs('folder', exist_ok=True)",
    ],
)
def test_one_that_shares_something_runs_from_its_first_line(tmp_path, monkeypatch, top):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENV, "HOME", str(tmp_path))
    (tmp_path / "beside.txt").write_text("read each time")
    for calls, same, _, _, asked in served(tmp_path, top):
        assert (calls, same, asked) == ("1", "True", "asked")


def test_each_log_says_what_the_program_said_before(tmp_path):
    words = program(tmp_path, SERVER.format(top="print('loaded', file=sys.stderr)"))
    for _ in range(2):
        done = ran(words)
        assert done.stderr == b"loaded\n" and b" False " in done.stdout


def test_what_is_printed_first_is_not_lost(tmp_path):
    shown = served(tmp_path, "print('hello')")
    assert all(words[:2] == ["hello", "1"] for words in shown)


def test_a_memory_database_of_the_top_is_one_for_each_copy(tmp_path):
    top = """
import sqlite3
table = sqlite3.connect(":memory:")
table.execute("create table t(x)")
class Calls(dict):
    def __setitem__(self, name, value):
        table.execute("insert into t values (1)")
        dict.__setitem__(self, name, table.execute("select count(*) from t").fetchone()[0])
state = Calls(calls=0)
"""
    assert [shown[:2] for shown in served(tmp_path, top)] == [["1", "False"]] * 3


def test_a_process_that_is_copied_and_dies_is_started_again(tmp_path):
    words = program(tmp_path, SERVER.format(top=""))
    ran(words)
    ((process, _),) = forked._running.values()
    below = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(below.stdout.split()[0]), signal.SIGKILL)
    process.wait(30)
    assert ran(words).returncode == 4
