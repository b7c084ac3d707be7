"""Copies of a Python program: they behave as the program would if it were started."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from envs import forked

ENV = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def program(folder, text, name="program.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


@pytest.fixture(autouse=True)
def ended():
    yield
    forked._end()


def both(words, *arguments, **options):
    """Return what a program does when it is started, and as a copy."""
    copy = forked.copying([*words, *arguments], ENV)
    assert copy != [*words, *arguments]
    started = subprocess.run([*words, *arguments], capture_output=True, env=ENV, **options)
    return started, subprocess.run(copy, capture_output=True, env=ENV, **options)


def ends(number):
    """Wait until a process has ended."""
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(number, 0)
            time.sleep(0.01)


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
    command = subprocess.Popen(forked.copying(words, ENV), stdout=subprocess.PIPE)
    number = int(command.stdout.readline())
    os.kill(number, 0)
    command.send_signal(signal.SIGKILL)
    command.wait()
    ends(number)


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
    ends(number)
    deadline = time.monotonic() + 30
    while place.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
