"""The pages in a real browser: what they show and ask for, hostile text, the keyboard, two widths,
dark and light."""

import base64
import itertools
import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from evolver.files.workdir import Workdir
from experiments.bench.browser import Browser, chromium
from experiments.view.bundle import write_bundle
from experiments.view.runs import named
from tests.experiments.test_view import made, record, served
from tests.tiny import tiny_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on the PATH; CHROMIUM can name one"),
]

BAD = "</script><script>pwned=1</script><img src=x onerror=pwned=2><b onclick=x>\x00\x1b[2J\u202egnp.exe\ud800"
PAGES = ("overview", "rollouts", "groups", "tasks", "experience", "judge")
SHOWN = "document.querySelector('#main h1') && !document.querySelector('#main').textContent.startsWith('Reading')"
# Of every element with text of its own: its colour against what lies behind it, as WCAG counts;
# those below 4.5.
FAINT = """(() => {
  const parts = (text) => { const n = text.match(/[\\d.]+/g).map(Number), one = text.startsWith('color(') ? 1 : 255;
    return [n[0] / one, n[1] / one, n[2] / one, n[3] ?? 1]; };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const behind = (node) => { const mine = node ? parts(getComputedStyle(node).backgroundColor) : [1, 1, 1, 1];
    return mine[3] === 1 ? mine : over(mine, behind(node.parentElement)); };
  const light = (c) => { const l = c.slice(0, 3).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2]; };
  const faint = [];
  for (const node of document.querySelectorAll('body *')) {
    if (!node.checkVisibility() || node.namespaceURI.endsWith('svg') && node.tagName !== 'text') continue;
    if (![...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(node), ground = behind(node);
    const [a, b] = [light(over(parts(node.tagName === 'text' ? style.fill : style.color), ground)), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${node.tagName} ${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()"""


WRONG = ("error", "warning", "assert")  # messages of the console
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "j": 74, "k": 75}


class Watched(Browser):
    """A browser that writes down what its page asks for and what it complains about, and that takes
    keys and a size."""

    def __init__(self) -> None:
        self.requests: list[str] = []  # the addresses that the page asked for
        # errors and warnings of the console, exceptions, refused requests
        self.complaints: list[str] = []
        super().__init__()

    def heard(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and params["type"] in WRONG:
            self.complaints.append(json.dumps(params["args"])[:500])
        elif event == "Log.entryAdded" and params["entry"]["level"] in WRONG:
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {params['message']}")

    def look(self, width: int, *, dark: bool = False) -> None:
        """Give the page a width and a colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        down = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=down, text=text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        """Write text where the focus is."""
        self.call("Input.insertText", text=text)

    def photograph(self, path: Path) -> None:
        """Write what the page shows to a .png file."""
        shown = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shown["data"]))


@pytest.fixture(scope="module")
def browser():
    with Watched() as opened:
        yield opened


@pytest.fixture
def page(browser):
    browser.open("about:blank")
    browser.requests.clear()
    browser.complaints.clear()
    browser.look(1280)
    yield browser
    assert browser.complaints == []
    near = r"http://127\.0\.0\.1:|file://|data:|about:"
    assert [url for url in browser.requests if not re.match(near, url)] == []


def a_run(folder: Path) -> Path:
    """A run with evaluations, experience, a policy whose tokenizer is known, and a group of hostile
    rollouts."""
    made(folder)
    tiny_policy(folder / "policy")
    values = {
        "eval/avg@2": 0.25, "eval/avg@2/low": 0.1, "eval/avg@2/high": 0.4, "eval/greedy": 0.5,
        "eval/greedy/low": 0.4, "eval/greedy/high": 0.6, "eval/best_temperature/avg": 0.3,
        "entropy": 0.7, "ledger/rollouts": 2, "ledger/trained": 2, "attributing/good_rate": 0.5,
        "alarm/weights": 1.0, BAD: 1.0,
    }  # fmt: skip
    Workdir(folder).log_metrics(4, values)
    shown = [{"id": BAD[:-1], "content": BAD}]
    bad = {"error": BAD, "components": {BAD: 1.0}, "experience": shown, "query": BAD}
    worst = [record(n, BAD[:-1], action=BAD + "y" * 2**20, **bad) for n in range(2)]
    said = [{"role": BAD, "content": BAD + "z" * 2**20}]
    for rollout in worst:
        rollout["turns"][0] |= {"reason": BAD, "observation": said}
    Workdir(folder).log_trajectories(4, worst)
    return folder


def visit(page: Browser, address: str) -> str:
    """Go to a page of the view and return its text."""
    if page.run("location.href") == address:
        page.open("about:blank")
    page.run("document.getElementById('main')?.replaceChildren()")
    page.open(address)
    page.until(SHOWN)
    return page.text()


def links(page: Browser, selector: str) -> list[str]:
    """The addresses that the elements of a page lead to."""
    script = "[...document.querySelectorAll('%s')].map((a) => a.getAttribute('href'))"
    return page.run(script % selector)


def deep(page: Browser, base: str) -> list[str]:
    """The addresses of a group, a rollout and a task."""
    visit(page, f"{base}#/groups?step=1")
    group, *_ = links(page, "td.t a")
    visit(page, base + group)
    rollout, *_ = links(page, ".head a")
    return [group, rollout, "#/task?run=0&id=t1"]


SAYS = {  # what a page says of `a_run`
    "overview": r"25\.0 → 25\.0\s+30\.0\s+50\.0 → 50\.0\s+14\s+14",
    "rollouts": r"16 of 16, 50\.0% successes",
    "rollouts?kind=step&success=1&task=t1": r"(\d+) of 16",
    "groups": r"9 groups with 16 rollouts",
    "tasks": r"Find t1\.\s+original\s+[–\d]*\s*50\.0% of 6",
    "experience": r"Look first\.\s+Find t1\.\s+\S+\s+6\s+0\.0\s+100\.0",
    "judge": r"success: 7\s+14\s+7\s+0\s+7",
}


def numbers(page: Browser, base: str) -> dict[str, str]:
    """What the pages say that the records of `a_run` say too."""
    group, rollout, _ = deep(page, base)
    shown = {address: visit(page, f"{base}#/{address}") for address in SAYS}
    said = {address: re.search(SAYS[address], text)[0] for address, text in shown.items()}
    alarm = "the engine does not sample with the weights it was given: step 4 (1)"
    assert alarm in shown["overview"]
    assert "failure 8" in shown["rollouts"] and "trained 14" in shown["rollouts"]
    visit(page, f"{base}#/rollouts")
    assert page.run("document.querySelectorAll('tbody tr').length") == 16
    visit(page, f"{base}#/rollouts?text=window&kind=step&success=1")
    page.until("!document.querySelector('#main').textContent.includes('indexed so far')")
    text = visit(page, base + group)
    said["group"] = re.search(r"1 of 2 succeeded", text)[0]
    for words in ("advantage +0.500", "advantage −0.250", "it found the seat"):
        assert text.count(words) == 2, words
    visit(page, base + rollout)
    titles = page.run("[...document.querySelectorAll('.tokens .k')].map((node) => node.title)")
    assert titles == [
        "id 5 · token 0 of turn 1 · trains · advantage 0.5 · log p -0.5 · gap 0 · ratio 1",
        "id 6 · token 1 of turn 1 · trains · advantage 0.5 · log p 0 · gap 0.001 · ratio 1.2",
    ]
    # the tokenizer's own text
    assert page.run("document.querySelector('.tokens .k').textContent") != "⟨5⟩"
    return said


def harmless(page: Browser, base: str) -> None:
    """Every page that shows text of a model shows it as text."""
    scripts = page.run("document.scripts.length")
    task = "#/task?run=0&id=" + urllib.parse.quote(BAD[:-1])
    group = "#/group?run=0&file=4&draw=1&task=" + task.partition("id=")[2]
    pages = {name: f"#/{name}" for name in PAGES}
    pages |= {name: f"#/{name}?step=4" for name in ("rollouts", "groups")}
    for address in (*pages.values(), task, "#/rollout?run=0&file=4&row=1", group):
        text = visit(page, base + address)
        assert "<script>pwned=1</script>" in text or address == "#/judge", address
        assert not {"\u202e", "\x1b", "\x00"} & set(text), address
        assert page.run("typeof pwned") == "undefined", address
        assert page.run("document.querySelectorAll('img, b[onclick], #main script').length") == 0, (
            address
        )
        assert page.run("document.scripts.length") <= scripts + 1, address
    assert "\\u202egnp.exe" in text and "\\ud800" in text and len(text) < 50_000
    page.run("document.querySelector('.text button').click()")  # show more of the long line
    assert 50_000 < len(page.text()) < 200_000


def test_the_overview_shows_what_a_run_is_doing_and_that_it_was_killed(page, tmp_path):
    folder, gib = a_run(tmp_path / "run"), 1 << 30
    told = {
        "host": "h", "phase": f"step 2/4 · {BAD[:-1]}", "tokens_per_s": 1234.0, "money": 2.5,
        "tokens": 600, "workers": {"mode": "http", "processes": 4, "episodes": 3},
        "servers": [{"name": "vllm 0", "state": "down", "running": 2, "waiting": 1, "restarts": 2}],
        "queues": [{"name": "judge", "running": 5, "waiting": 0}],
        "memory": [{"name": "GPU 0", "used": 7 * gib, "of": 80 * gib}],
    }  # fmt: skip
    (folder / "now.json").write_text(json.dumps(told))
    with served(folder) as server:
        visit(page, f"{server.url}#/overview")
        page.until("document.querySelector('#now table')")
        text = " ".join(page.text().split())
        assert "on h" in text and "<script>pwned=1</script>" in text
        assert page.run("typeof pwned") == "undefined"
        for line in (
            "tokens per second 1,234", "cost so far 2.5 money, 600 tokens of language models",
            "workers 4 (http), 3 episodes", "memory, GPU 0 7.0 GiB of 80.0 GiB",
            "server vllm 0 down, 2 running, 1 waiting, started again 2 times",
            "queue of judge 5 running",
        ):  # fmt: skip
            assert line in text, line
        assert "the run was killed" not in text
        os.utime(folder / "now.json", (0, 0))
        visit(page, f"{server.url}#/overview")
        page.until("document.querySelector('#now p.warn')")
        assert "the run was killed, or its machine stands still" in page.text()


def test_every_number_of_a_table_leads_to_what_is_behind_it(page, tmp_path):
    folder = a_run(tmp_path / "run")
    call = {"step": 1, "role": "step_judge", "what": "call", "model": "m", "prompt_tokens": 5}
    (folder / "llm.jsonl").write_text(json.dumps(call | {"seconds": 0.5}) + "\n")
    score = {"policy": "p", "split": "dev", "tasks": 2}
    score |= {"avg@2": 0.5, "avg@2/low": 0.4, "avg@2/high": 0.6}
    (folder / "eval.jsonl").write_text(json.dumps(score) + "\n")
    plain = """[...document.querySelectorAll('#main td.n')]
        .filter((cell) => /[1-9]/.test(cell.textContent) && !cell.querySelector('a'))
        .map((cell) => cell.closest('table').querySelectorAll('th')[cell.cellIndex].innerText)"""
    with served(folder) as server:
        for name in PAGES:
            text = visit(page, f"{server.url}#/{name}")
            heads = {head.split()[0].lower() for head in page.run(plain)}
            assert heads <= {"difficulty", "level"}, name
            for link in set(links(page, "td.n a")):
                visit(page, server.url + link)
                assert page.run("document.querySelector('h1') !== null"), link
            assert "step_judge" in text or name not in ("overview", "judge")
        shown = visit(page, f"{server.url}#/rollouts?compared=exp/1")
        assert "12 of 16" in shown  # six that it was shown in, and six beside them
        assert "14 of 16" in visit(page, f"{server.url}#/rollouts?kind=step&labelled=1")
        group, rollout, _ = deep(page, server.url)
        visit(page, server.url + group)
        marks = links(page, ".cell a")
        # two rollouts of two turns: the tokens of an advantage
        assert len(marks) == 4 and rollout in marks
        assert "undefined" not in visit(page, server.url + rollout)


def test_a_group_and_a_rollout_wait_for_their_file_only(page, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.view.runs.PART", 1)  # every file is a part
    with served(a_run(tmp_path / "run")) as server:
        for address in (
            "#/rollout?run=0&file=4&row=1",
            "#/group?run=0&file=4&draw=1&task=" + urllib.parse.quote(BAD[:-1]),
        ):
            page.open("about:blank")
            assert "advantage" in visit(page, server.url + address)
            assert page.run("view.runs[0].pending") > 0


def test_a_server_and_a_bundle_show_what_the_records_say_and_hostile_text_as_text(page, tmp_path):
    write_bundle(named([str(a_run(tmp_path / "run"))]), tmp_path / "bundle")
    base = (tmp_path / "bundle/index.html").as_uri()
    said = numbers(page, base)
    harmless(page, base)
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about"}
    with served(tmp_path / "run") as server:
        assert numbers(page, server.url) == said
        harmless(page, server.url)
        visit(page, f"{server.url}#/rollouts")
        assert page.run("document.cookie + localStorage.length + sessionStorage.length") == "00"
    assert any("/api/run/0/index" in url for url in page.requests)


def test_a_group_splits_advantages_and_names_answers_and_can_be_read_on_a_narrow_screen(
    page, tmp_path
):
    folder = made(tmp_path)
    group = [record(n, expected="7 flights", given="6 flights" if n else "") for n in range(8)]
    for rollout in group:
        rollout["turns"][0]["outcome_advantage"] = 0.7
    held_out = [record(n, "h9", fate=("sampled", "greedy")[n == 8]) for n in range(9)]
    Workdir(folder).log_trajectories(4, group)
    Workdir(folder).log_trajectories("held_out_000004", held_out)
    boxes = """[...document.querySelectorAll('.side > section')].map((node) => {
        const box = node.getBoundingClientRect(); return [box.left, box.right, box.top, box.bottom]; })"""
    wide = "[...document.querySelectorAll('.side *')].filter((n) => n.scrollWidth > 400).length"
    with served(folder) as server:
        text = visit(page, f"{server.url}#/groups?task=h9")
        assert "2 groups with 9 rollouts" in text and "sampled" in text and "greedy" in text
        hrefs = page.run("[...document.querySelectorAll('td.t a')].map((a) => a.href)")
        counts = [re.search(r"\d of (\d) succeeded", visit(page, href))[1] for href in hrefs]
        assert sorted(counts) == ["1", "8"]
        address = f"{server.url}#/group?run=0&file=5&draw=1&task=t1"
        text = visit(page, address)
        assert text.count("advantage +0.500") == text.count("= outcome +0.700, labels −0.200") == 8
        assert text.count("expected answer: 7 flights · given: 6 flights") == 7
        assert "expected answer: 7 flights · given: none" in text
        lefts = [left for left, _, _, _ in page.run(boxes)]
        assert lefts == sorted(set(lefts)) and len(lefts) == 8  # side by side
        tops = "[...document.querySelectorAll('.side .cell')].map((n) => n.getBoundingClientRect().top)"
        assert len(set(page.run(tops))) == 2  # turns of equal number stand beside each other
        page.look(400)
        visit(page, address)
        found = page.run(boxes)
        assert all(left >= 0 and 340 < right - left <= 400 for left, right, _, _ in found)
        assert all(a[3] <= b[2] for a, b in itertools.pairwise(found)) and page.run(wide) == 0
        visit(page, f"{server.url}#/rollout?run=0&file=5&row=1")
        text = page.text()
        assert "= outcome +0.700, labels −0.200" in text and "given: 6 flights" in text


def test_a_page_follows_its_run(page, tmp_path):
    with served(made(tmp_path)) as server:
        assert "14 of 14" in visit(page, f"{server.url}#/rollouts")
        asked = "performance.getEntriesByType('resource')"
        page.until(f"{asked}.some((e) => e.name.endsWith('api/states'))")
        Workdir(tmp_path).log_trajectories(4, [record(0)])
        page.until("document.body.innerText.includes('15 of 15')")
        Workdir(tmp_path).rewind(2)
        page.until("document.body.innerText.includes('10 of 10')")


def test_a_long_run_shows_its_latest_rollouts_while_the_others_are_read(
    page, tmp_path, monkeypatch
):
    monkeypatch.setattr("experiments.view.runs.PART", 1)
    with served(made(tmp_path, steps=40)) as server:
        visit(page, f"{server.url}#/rollouts")
        assert page.run("document.querySelector('tbody td').textContent") == "40"
        page.until("document.body.innerText.includes('162 of 162')")
        assert "still being read" not in page.text()
        steps = page.run("[...new Set(view.runs[0].rows.step)].sort((a, b) => a - b)")
        assert steps == list(range(1, 41)) and page.run("view.runs[0].files.length") == 41


def focus(page: Browser) -> str:
    """What has the focus, if one can see that it has."""
    return page.run("""(() => {
      const node = document.activeElement, style = getComputedStyle(node);
      if (node === document.body) return "";
      const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
      const label = node.labels?.[0]?.firstChild.textContent || node.textContent || node.getAttribute("aria-label");
      return (seen ? "" : "unseen ") + (label || node.tagName);
    })()""")


def test_everything_can_be_reached_and_seen_with_the_keyboard(page, tmp_path):
    with served(a_run(tmp_path)) as server:
        visit(page, f"{server.url}#/overview")
        page.run("document.body.focus(), getSelection().removeAllRanges()")
        page.press("Tab")
        reached = [focus(page)]
        for _ in range(60):
            page.press("Tab")
            reached.append(focus(page))
        assert not [text for text in reached if text.startswith("unseen")]
        assert {"Rollouts", "Judge", "25.0", "held-out measure"} <= set(reached)
        page.run("document.querySelector('figure svg[role=application]').focus()")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.press(key)
        page.until("location.hash.startsWith('#/rollouts?') && " + SHOWN)
        _, rollout, _ = deep(page, server.url)
        visit(page, server.url + rollout)
        row = "new URLSearchParams(location.hash.split('?')[1]).get('row')"
        main = "document.getElementById('main').textContent"
        assert page.run(row) == "0"
        for key, wanted, words in (("j", "1", "(2 of 2)"), ("k", "0", "(1 of 2)")):
            page.press(key)  # the address changes before the page does
            page.until(f"{row} === '{wanted}' && {main}.includes('{words}')")
        page.run("document.querySelector('.tokens .k').focus()")
        token = "document.getElementById('token').textContent"
        assert page.run(token).startswith("id 5 · token 0 of turn 1")
        page.press("Tab")
        assert page.run(token).startswith("id 6 ")
        visit(page, f"{server.url}#/rollouts")
        page.run("document.querySelector('input[name=task]').focus()")
        page.type("t2")
        page.press("Enter")
        page.until("document.body.innerText.includes('6 of 16')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_the_screen_and_can_be_read(page, tmp_path, width, dark):
    page.look(width, dark=dark)
    with served(a_run(tmp_path)) as server:
        pages = [f"#/{name}" for name in PAGES]
        for address in (*pages, *deep(page, server.url), "#/group?run=0&file=4&draw=1"):
            visit(page, server.url + address)
            assert page.run("document.documentElement.scrollWidth") <= width, address
            assert page.run(FAINT) == [], address
        page.photograph(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
