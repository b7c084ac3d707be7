"""A headless Chromium, driven by the DevTools protocol over two pipes: no package, no port.

Names resolve nowhere but on 127.0.0.1, so that a page cannot reach anything else.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

from envs.values import Json

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--mute-audio", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--disable-default-apps", "--password-store=basic",
    "--hide-scrollbars", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and writes to descriptor 4.
_START = """
import os, sys
reads, writes = int(sys.argv[1]), int(sys.argv[2])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
SILENCE = 60.0  # seconds until a message
PATIENCE = 30.0  # seconds until an expression holds


def chromium() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One Chromium with one page. Leaving its `with` block ends it."""

    def __init__(self) -> None:
        path = chromium()
        if path is None:
            raise FileNotFoundError(f"no browser: none of {', '.join(NAMES)} is on the PATH")
        self.profile = tempfile.mkdtemp(prefix="evolver-browser-")
        commands, ours_to_write = (_high(end) for end in os.pipe())
        ours_to_read, answers = (_high(end) for end in os.pipe())
        start = [sys.executable, "-c", _START, str(commands), str(answers)]
        self.process = subprocess.Popen(
            [*start, path, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._write, self._read, self._unread, self._count = ours_to_write, ours_to_read, b"", 0
        self.session = ""
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            self.call(f"{domain}.enable")
        # as in the window that the user works in
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.session = ""
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
        self.process.wait(10)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> Json:
        """Send a command and return its result. Raises RuntimeError with the browser's own
        words."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error'].get('message')}")
                return found["result"]

    def _next(self) -> Json:
        """Return the next message."""
        deadline = time.monotonic() + SILENCE
        while b"\0" not in self._unread:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium sent nothing for {SILENCE:g} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise OSError("Chromium has ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(line)
        self.heard(message.get("method", ""), message.get("params", {}))
        return message

    def heard(self, event: str, params: Json) -> None:
        """Do nothing with an event; a subclass may note it."""

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, awaited if it is a promise. Raises
        RuntimeError."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:1000])
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression holds. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > deadline:
                shown = self.text()[:400]
                raise TimeoutError(f"{script}: not true within {PATIENCE:g} s; the page: {shown}")
            time.sleep(0.02)

    def text(self) -> str:
        """Return the text that the page shows."""
        return self.run("document.body.innerText")

    def open(self, address: str) -> None:
        """Go to an address and wait until the document is loaded."""
        found = self.call("Page.navigate", url=address)
        if found.get("errorText"):
            raise RuntimeError(f"{address}: {found['errorText']}")
        self.until("document.readyState === 'complete'")


def _high(descriptor: int) -> int:
    """Return a copy of a descriptor above those that Chromium's own take the place of, and close
    the original."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
