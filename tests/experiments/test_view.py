"""The view shows what runs wrote, as it is: by a server, as static files and as text; hostile text
stays text."""

import base64
import gzip
import http.client
import io
import itertools
import json
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import envs
from envs.probed import probed
from envs.world import Task
from evolver.attributing.replay import ReplayJudge
from evolver.files.rollout_files import record_of, write_rollouts
from evolver.files.workdir import Workdir
from evolver.navigating import new_experience
from evolver.parts import Parts
from evolver.replaying import attempt
from experiments.view.__main__ import main
from experiments.view.bundle import resources, write_bundle
from experiments.view.replay import compare
from experiments.view.runs import Run, encoded, named, problems
from experiments.view.search import Search
from experiments.view.server import STATIC, View
from experiments.view.text import visible
from tests.tiny import tiny_policy

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[2J\u202egnp.exe\ud800"
    + "y" * 2**20
)


def record(
    number: int, task: str = "t1", *, action: str = "look around", fate: str = "trained", **more
) -> dict:
    turns = [
        {"action": action, "label": 1, "reason": "it found the seat", "advantage": 0.5, "tokens": [5, 6], "prompt": [1],
         "observation": [{"role": "tool", "content": "a window"}], "logprobs": [-0.5, 0.0], "gap": [0.0, 0.001],
         "ratio": [1.0, 1.2], "stop": "stop", "version": 3, "continues": False},
        {"action": "done", "label": 0, "reason": "nothing shows it", "advantage": -0.25, "observation": [],
         "tokens": [], "prompt": []},
    ]  # fmt: skip
    return {
        "task": task, "rollout": number, "draw": 1, "origin": "original", "difficulty": 2, "query": f"Find {task}.",
        "stop": "done", "score": number % 2, "success": bool(number % 2), "fate": fate, "seed": 1, "messages": [],
        "experience": [{"id": "exp/1", "content": "Look first."}] if number == 0 else [], "error": "",
        "components": {}, "turns": turns,
        **more,
    }  # fmt: skip


def made(folder: Path, steps: int = 3) -> Path:
    """Write the workdir of a run of some steps with two groups of two rollouts each."""
    workdir = Workdir(folder)
    workdir.claim({"env": {"name": "toy"}, "steps": 9, "attributing": {"enabled": True}, "seed": 4})
    for step in range(1, steps + 1):
        workdir.log_metrics(
            step, {"rollout/success": 0.5, "ledger/rollouts": 4, "ledger/trained": 4}
        )
        rollouts = itertools.product(("t1", "t2"), range(2))
        workdir.log_trajectories(step, [record(i, task) for task, i in rollouts])
    held_out = [record(n, "h1", fate=fate) for n, fate in enumerate(("sampled", "greedy"))]
    workdir.log_trajectories("held_out_000002", held_out)
    known = Task("t1", "toy", "Find t1.", reference=["look"], verifier={"probes": [1]})
    workdir.log_tasks([known, Task("t2", "toy", "Find t2.")])
    (folder / "experience").mkdir(exist_ok=True)
    experience = new_experience("w", "Look first.", sources=["t1"]).to_dict()
    lines = [{"format": "x"}, experience | {"id": "exp/1", "uses": 3, "wins": 1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "experience/experiences.jsonl").write_text(text)
    return folder


@contextmanager
def served(*folders: Path):
    server = View(named([str(folder) for folder in folders]))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def ask(server: View, path: str, *, host: str = "", method: str = "GET"):
    port = server.server_address[1]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        body = answer.read()
        is_json = "json" in (answer.headers["Content-Type"] or "")
        return answer, json.loads(body) if is_json else body


def test_a_server_gives_pages_and_every_resource_and_nothing_else(tmp_path):
    made(tmp_path / "run")
    (tmp_path / "secret.js").write_text("secret")
    with served(tmp_path / "run") as server:
        assert server.server_address[0] == "127.0.0.1"
        for path in ("/", *(f"/{file.name}" for file in STATIC.iterdir())):
            answer, body = ask(server, path)
            assert answer.status == 200 and body
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        pathless = ("runs", "run/0/overview")  # a bundle leaves the path of the workdir out
        for name, value in resources(server.runs):
            found = ask(server, f"/api/{name}")[1]
            assert name in pathless or found == json.loads(json.dumps(value)), name
        overview = ask(server, "/api/run/0/overview")[1]
        assert overview["metrics"]["rollout/success"] == [0.5] * 3 and overview["seed"] == 4
        for path in (
            "/../secret.js", "/..%2fsecret.js", "/%2e%2e/secret.js", "/api/run/1/index", "/api/run/-1/index",
            "/api/run/0/rollouts/0/7", "/api/run/x/index", "/api/run/0/config", "/api/", "/api/run/0/index?first=x",
            "/api/run/0/index?end=y",
        ):  # fmt: skip
            answer, said = ask(server, path)
            assert answer.status == 404 and b"there is no such" in said, path
        assert ask(server, "/", host="evil.example:80")[0].status == 403
        assert ask(server, "/", method="POST")[0].status == 501


def test_a_page_that_is_closed_early_leaves_no_trace_in_the_terminal(tmp_path, capfd):
    with served(made(tmp_path)) as server:
        for sent in (b"", b"GET /api/run/0/index HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"):
            connection = socket.create_connection(server.server_address)
            connection.sendall(sent)
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.close()
        assert ask(server, "/api/runs")[0].status == 200
    assert capfd.readouterr().err == ""


def show(folder: Path, words: str) -> int:
    return main([str(folder), *shlex.split(words)])


@pytest.fixture
def told(stdout):
    """Return a function that shows a run as text and returns the text."""

    def tell(folder: Path, words: str = "") -> str:
        assert show(folder, f"--text {words}") == 0
        return stdout()

    return tell


def grown(folder: Path) -> Search:
    """Return the index of the words of a run, as far as it can be made."""
    search = Search(Run(folder))
    search.grow()
    return search


def rows_with(search: Search, words: str) -> dict[int, list[int]]:
    """Return {number of a file: rows} of the rollouts that hold these words."""
    return search.find(words)["files"]


def part(run: Run, first: int = -1, end: int = -1, generation: int = -1) -> dict:
    """What a page gets that holds the files from `first` to `end`."""
    return json.loads(run.index_text(first, end, generation))


def test_an_index_grows_with_its_run_and_starts_over_when_it_resumes(tmp_path):
    run = Run(made(tmp_path))
    first = part(run)
    assert [(f["kind"], f["step"], f["count"]) for f in first["files"]] == [
        ("step", 1, 4), ("held_out", 2, 2), ("step", 2, 4), ("step", 3, 4)
    ]  # fmt: skip
    assert first == run.index() and (first["first"], first["pending"]) == (0, 0)
    Workdir(tmp_path).log_trajectories(4, [record(0)])
    more = part(run, 0, 4, first["generation"])
    assert [f["step"] for f in more["files"]] == [4] and more["first"] == 4 and more["pending"] == 0
    assert part(run, 0, 5, first["generation"])["files"] == []
    Workdir(tmp_path).rewind(2)
    again = part(run, 0, 5, first["generation"])
    assert again["generation"] != first["generation"] and again["first"] == 0
    assert [f["step"] for f in again["files"]] == [1, 2, 2]


def test_a_page_gets_the_latest_files_of_a_long_run_first(tmp_path, monkeypatch):
    run = Run(made(tmp_path))
    whole = Run(tmp_path).index()
    monkeypatch.setattr("experiments.view.runs.PART", 1)  # one file an answer
    first = part(run)
    generation = first["generation"]
    assert (first["first"], first["pending"], first["files"]) == (3, 3, whole["files"][3:])
    before = part(run, 3, 4, generation)
    assert (before["first"], before["pending"], before["files"]) == (2, 2, whole["files"][2:3])
    Workdir(tmp_path).log_trajectories(4, [record(0)])
    rest = [part(run, *held, generation) for held in ((2, 4), (2, 5), (1, 5), (0, 5))]
    found = [(r["first"], r["pending"], [file["step"] for file in r["files"]]) for r in rest]
    assert found == [(4, 2, [4]), (1, 1, [2]), (0, 0, [1]), (0, 0, [])]


def test_rows_of_the_index_are_the_rollouts_of_the_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("evolver.files.rollout_files.MEMBER", 1500)  # several parts per file
    run = Run(made(tmp_path))
    for number, file in enumerate(run.index()["files"]):
        parts = (run.records(number, member) for member in range(len(file["members"])))
        found = list(itertools.chain.from_iterable(parts))
        assert [r["rollout"] for r in found] == file["columns"]["rollout"]
        assert file["columns"]["good"] == [1] * file["count"]
        assert file["columns"]["abstained"][0] == ["nothing shows it"]
    assert len(file["members"]) > 1


def test_token_ids_get_the_text_of_the_policys_tokenizer(tmp_path):
    made(tmp_path / "run")
    tiny_policy(tmp_path / "run" / "policy")
    chunk = Run(tmp_path / "run").chunk(0, 0)
    assert set(chunk["pieces"]) == {1, 5, 6}
    assert all(isinstance(piece, str) for piece in chunk["pieces"].values())
    assert any(chunk["pieces"].values()) and chunk["without_pieces"] == ""


def test_words_are_found_by_their_beginnings_in_new_files_too_and_after_a_resume(tmp_path):
    run = Run(made(tmp_path))
    actions = ("Buy_a TICKET, now", HOSTILE)
    Workdir(tmp_path).log_trajectories(4, [record(n, action=a) for n, a in enumerate(actions)])
    search = Search(run)
    assert rows_with(search, "ticket") == {}
    search.grow()
    assert rows_with(search, "tick buy") == {4: [0]} and (search.done, search.of) == (5, 5)
    # no query language: all of these words
    assert rows_with(search, 'alert" OR (x NEAR *') == {}
    assert rows_with(search, "script ALERT onerror") == {4: [1]}
    every = {n: list(range(count)) for n, count in enumerate([4, 2, 4, 4, 2])}
    assert rows_with(search, "window found") == every
    assert rows_with(search, " -!") == {} and (tmp_path / ".view" / "words.sqlite").is_file()
    Workdir(tmp_path).rewind(2)
    Workdir(tmp_path).log_trajectories(3, [record(0, action="something new")])
    again = grown(tmp_path)
    assert rows_with(again, "ticket") == {} and rows_with(again, "something") == {3: [0]}
    foreign = b"this is no database, whatever its name says" * 99
    (tmp_path / ".view" / "words.sqlite").write_bytes(foreign)
    again.grow()
    assert rows_with(again, "something") == {3: [0]}


def test_a_workdir_that_cannot_be_written_is_searched_too(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    made(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    search = grown(tmp_path)
    assert rows_with(search, "window") and not (tmp_path / ".view").exists()
    search.close()
    assert not search.path.exists()


def unpacked(path: Path):
    name, packed = re.fullmatch(r"deliver\((\".*?\"), (\".*\")\);\n", path.read_text()).groups()
    return json.loads(name), json.loads(gzip.decompress(base64.b64decode(json.loads(packed))))


def test_a_bundle_holds_every_resource_and_no_address(tmp_path):
    Workdir(made(tmp_path / "run")).log_trajectories(4, [record(0, action=HOSTILE)])
    runs = named([str(tmp_path / "run")])
    write_bundle(runs, tmp_path / "bundle")
    scripts = (tmp_path / "bundle/data").iterdir()
    found = dict(unpacked(path) for path in scripts if path.name != "bundle.js")
    assert found == json.loads(json.dumps(dict(resources(runs))))
    assert found["run/0/rollouts/4/0"]["records"][0]["turns"][0]["action"] == HOSTILE
    page = (tmp_path / "bundle/index.html").read_text()
    assert page.index("data/bundle.js") < page.index("base.js") and "<!-- bundle -->" not in page
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert name.startswith(("#", "data:")) or (tmp_path / "bundle" / name).is_file()
    assert str(tmp_path) not in json.dumps(found)  # it is made to be given to others


def test_pages_never_turn_data_into_markup_or_code_and_load_nothing_from_elsewhere():
    for path in STATIC.iterdir():
        text = path.read_text()
        markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc"
        wrong = re.findall(markup + r"|\beval\(|new Function", text)
        assert not wrong, (path.name, wrong)
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, (path.name, addresses)
        assert "style=" not in text or path.suffix == ".js"  # the policy of the server refuses it


@pytest.mark.skipif(
    shutil.which("node") is None,
    reason="the filters run in a browser; install node to test them here",
)
def test_filters_pick_the_rows_that_they_name(tmp_path):
    files = Run(made(tmp_path)).index()["files"]
    cases = {
        "{}": 14, "{step: '2'}": 6, "{step: '2-3'}": 10, "{kind: 'held_out'}": 2, "{task: 't1', success: '1'}": 3,
        "{guided: '1'}": 7, "{experience: 'exp/1', step: '-1'}": 2, "{fate: 'greedy'}": 1, "{label: 'bad'}": 0,
        "{reason: 'nothing shows it', kind: 'step'}": 12, "{stop: 'max_turns'}": 0, "{difficulty: '2', draw: '1'}": 14,
        "{task: 'find'}": 14, "{task: 'T1'}": 6, "{task: 'zebra'}": 0, "{beside: 'exp/1'}": 6, "{agrees: '1'}": 0,
        "{replayed: '1,-1'}": 1, "{replayed: 'any'}": 2, "at(4)": 1, "at(0)": 2, "at(5)": 1,
    }  # fmt: skip
    cells = [
        {"judge": 1, "replay": replay, "rollouts": [["step_000001.jsonl.gz", 1 + replay]]}
        for replay in (1, -1)
    ]
    script = (STATIC / "base.js").read_text() + (STATIC / "rollouts.js").read_text()
    script += f"""
        const run = new Run(0, 'r');
        {json.dumps(files)}.forEach((f, i) => run.add(f, i));
        const query = (i) => address('group', groupOf(run, i)).split('?')[1];
        const at = (i) => Object.fromEntries(new URLSearchParams(query(i)));
        run.overview = {json.dumps({"replayed": [{"table": cells}]})};
        console.log(JSON.stringify([{", ".join(f"select(run, {case}).length" for case in cases)}]));
    """
    done = subprocess.run(
        ["node", "-"], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert dict(zip(cases, json.loads(done.stdout))) == cases


def test_text_splits_advantages_names_answers_and_keeps_greedy_rollouts_apart(tmp_path, told):
    shown = record(1, expected="7 flights", given="6 flights")
    shown["turns"][0]["outcome_advantage"] = 0.7
    silent = record(1, "t2", expected="7 flights")
    Workdir(made(tmp_path)).log_trajectories(3, [shown, silent])
    held_out = [record(n, "h9", fate=("sampled", "greedy")[n == 2]) for n in range(3)]
    Workdir(tmp_path).log_trajectories("held_out_000003", held_out)
    out = told(tmp_path, "--step 3 --task t1")
    assert "turn 1  advantage +0.500 = outcome +0.700, labels -0.200  GOOD" in out
    assert "expected 7 flights" in out and "given 6 flights" in out
    assert "given no answer" in told(tmp_path, "--step 3 --task t2")
    lines = [line for line in told(tmp_path, "--step 3").split("\n") if "h9" in line]
    found = [("sampled" in line, "greedy" in line) for line in lines]
    assert found == [(True, False), (False, True)]
    assert told(tmp_path, "--step 3 --task h9").count("held_out_000003  h9") == 2


def test_text_is_shown_in_any_locale(tmp_path, monkeypatch):
    """As with LC_ALL=C, PYTHONUTF8=0 and PYTHONCOERCECLOCALE=0, and with a closed output."""
    words = [str(made(tmp_path)), "--text", "--task", "t1"]
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for stdout in (out, None):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words) == 0
    out.flush()
    assert b"rollout 0 ? failure" in out.buffer.getvalue()


def test_text_shows_a_group_and_what_is_hidden_in_it(tmp_path, told):
    group = [record(0, "t1", action="\x1b[2Jpwned\u202e"), record(1, "t2")]
    Workdir(made(tmp_path)).log_trajectories(3, group)
    out = told(tmp_path)
    assert "2 groups of step 3" in out and "Find t2." in out and "1/1" in out
    out = told(tmp_path, "--task 'find T1' --step 3")
    parts = ["rollout 0 · failure", "guided", "shown Look first.", "< a window"]
    parts += ["turn 1  advantage +0.500  GOOD: it found the seat", "no label: nothing shows it"]
    assert all(part in out for part in [*parts, "\\x1b[2Jpwned\\u202e"])
    assert not any(part in out for part in ("\x1b", "\u202e", "Find t2."))
    assert "no rollout belongs to a task" in told(tmp_path, "--task zebra")
    assert visible("a\tb\nc\rd\u2066\ud800é") == "a\tb\nc\\rd\\u2066\\ud800é"


def test_arguments_that_cannot_be_used_are_explained(tmp_path, stderr, stdout):
    run = made(tmp_path / "runs" / "a")
    assert show(tmp_path / "none", str(tmp_path / "runs")) == 2
    said = stderr()
    assert "there is no such directory" in said and "holds the workdirs a" in said
    assert problems([str(run)]) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    assert show(run, f"--bundle {tmp_path}/full") == 2
    assert "name another directory" in stderr()
    assert show(run, "--task x") == 2
    assert show(run, f"--bundle {tmp_path}/new") == 0
    assert "index.html" in stdout()
    twice = named([str(run), f"{tmp_path}/new/../runs/a"])
    assert twice[0].name != twice[1].name


def test_figures_that_are_not_finite_are_left_out(tmp_path):
    Workdir(tmp_path).log_trajectories(1, [record(0)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "x": Infinity}\n')
    metrics = json.loads(encoded(Run(tmp_path).overview()))["metrics"]
    assert metrics == {"step": [1], "loss": [None], "x": [None]}
    assert encoded([{1: float("nan")}, "\ud800"]) == b'[{"1":null},"\\ud800"]'


def test_rollouts_that_vanish_while_they_are_read_are_found_again(tmp_path):
    run = Run(made(tmp_path))
    run.refresh()
    (tmp_path / "trajectories/step_000001.jsonl.gz").unlink()
    (tmp_path / "trajectories/step_000001.index.json.gz").unlink()
    assert run.load() == 0 and run.load([1, 0, 2]) == 1
    assert [f["step"] for f in run.index()["files"]] == [2, 2, 3]
    write_rollouts(tmp_path / "trajectories/step_000001.jsonl.gz", [record(0)])
    assert [f["step"] for f in run.index()["files"]] == [2, 2, 3, 1]


def test_labels_are_compared_with_those_of_replay(tmp_path, stderr, stdout):
    world = probed(envs.make("travel"))
    judge = ReplayJudge(Parts(make_world=lambda: probed(envs.make("travel"))))
    tasks = world.tasks("train")[:6]
    trajectories = [attempt(world, task, task.reference) for task in tasks]
    for trajectory, labels in zip(trajectories, judge.label(trajectories)):
        for turn, label in zip(trajectory.turns, labels):
            turn.label = label.value
    judge.close()
    workdir = Workdir(tmp_path)
    workdir.claim({"env": {"name": "travel"}})
    workdir.log_tasks(tasks)
    workdir.log_trajectories(1, [record_of(t, fate="trained") for t in trajectories])
    turns = itertools.chain.from_iterable(t.turns for t in trajectories)
    good = sum(turn.label == 1 for turn in turns)
    assert good > 3 and show(tmp_path, "--replay 50") == 0
    assert "6 rollouts replayed, 0 skipped" in stdout()
    (found,) = Run(tmp_path).overview()["replayed"]
    assert found["both"] == found["agreed"] >= good
    for turn in trajectories[0].turns:
        turn.label = -1  # a judge that is wrong about the first rollout
    workdir.log_trajectories(1, [record_of(t, fate="trained") for t in trajectories])
    found = compare(Run(tmp_path), 50)
    (wrong,) = [cell for cell in found["table"] if (cell["judge"], cell["replay"]) == (-1, 1)]
    assert found["both"] - found["agreed"] == wrong["turns"] > 0
    assert wrong["rollouts"] == [("step_000001.jsonl.gz", 0)]
    # of another version
    (tmp_path / ".view/replay.json").write_text('{"rollouts": 1, "table": [{"judge": 1}]}\n')
    assert Run(tmp_path).overview()["replayed"] == []
    (tmp_path / "config.json").unlink()
    assert show(tmp_path, "--replay 1") == 1 and "names the world" in stderr()


def test_a_port_that_is_taken_is_said_as_such():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            View([], taken.getsockname()[1])
