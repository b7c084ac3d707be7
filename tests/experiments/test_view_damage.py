"""Damaged files and files that were made to do harm: the view says what is wrong with which line,
shows the rest, and ends."""

import gzip
import json
import os
import shutil
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import command
from configs import base, quickstart
from evolver.config.checks.workdir import workdir_problems
from evolver.files.rollout_files import index_of, index_path, write_rollouts
from evolver.files.workdir import Workdir
from evolver.navigating import new_experience
from experiments.view.bundle import resources
from experiments.view.runs import Run
from experiments.view.search import Search
from tests.experiments.test_view import ask, grown, made, record, rows_with, served, show
from tests.odd_parts import replaced

DEEP = "[" * 900 + "]" * 900
DEEPER = "[" * 100_000


def spoilt(value: Any, place: str, new: object) -> Any:
    """Return a JSON value with another part at a place such as "turns.0.tokens"."""
    path = (int(word) if word.isdigit() else word for word in place.split("."))
    return replaced(value, tuple(path), new)


WHOLE = record(0, messages=[{"role": "user", "content": "Go."}])
RECORDS = {
    "turns": 5, "turns.0": 5, "turns.0.tokens": "abc", "turns.0.tokens.0": 1.5, "turns.0.tokens.1": None,
    "turns.0.observation": 5, "turns.0.observation.0": "a window", "experience": 5, "experience.0": "exp/1",
    "experience.0.id": ..., "turns.0.prompt.0": -1, "turns.0.label": True, "turns.0.logprobs.0": "-0.5",
    "turns.0.advantage": float("nan"), "turns.0.reason": None, "turns.0.info": [], "draw": 10**30,
    "score": "1", "success": 1, "components.judged": [], "task": ["t1"], "query": None, "error": {},
    "seed": 1.5, "messages.0": 5, "rollout": -1,
}  # fmt: skip
LINES = {
    "line 2: messages.0.content": json.dumps(record(1, messages=[{"content": 7}])).replace("7", DEEP),
    "line 2: it is nested too deeply": DEEPER, "line 2: : Input should be a valid dictionary": "[1]",
    "line 2: Expecting": "{", "line 2: Exceeds the limit": json.dumps(record(1)).replace(": 1,", ": 1" + "0" * 5000 + ","),
}  # fmt: skip
for place, wrong in RECORDS.items():
    LINES[f"line 2: {place}: "] = json.dumps(spoilt(WHOLE, place, wrong))


def written(path: Path, lines: list[str], index: dict | None = None) -> None:
    """Write lines to a file of rollouts, with an index of three of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = gzip.compress("".join(line + "\n" for line in lines).encode())
    path.write_bytes(body)
    if index is not None:
        whole = index | {"members": [(0, len(body), len(lines))], "bytes": len(body)}
        index_path(path).write_bytes(gzip.compress(json.dumps(whole).encode()))


def configured(folder: Path, config: object, **more) -> Path:
    """Write the workdir of a run with this config."""
    (made(folder) / "config.json").write_text(json.dumps({"config": config} | more))
    return folder


def shown(folder: Path) -> dict:
    """What a server answers for every resource; each answer is one."""
    with served(folder) as server:
        answers = {name: ask(server, f"/api/{name}") for name, _ in resources(server.runs)}
    assert {answer.status for answer, _ in answers.values()} == {200}
    return {name: body for name, (_, body) in answers.items()}


@pytest.mark.parametrize("indexed", [False, True])
def test_a_line_that_is_no_rollout_is_named_and_the_others_are_shown(tmp_path, stdout, indexed):
    good = [record(0), record(1), record(2, action="an unusual word")]
    for number, line in enumerate(LINES.values()):
        path = tmp_path / f"trajectories/step_{number:06d}.jsonl.gz"
        lines = [json.dumps(good[0]), line, json.dumps(good[2])]
        written(path, lines, index_of(good) if indexed else None)
    run, numbers = Run(tmp_path), [0, 1, 2] if indexed else [0, 2]
    files = run.index()["files"]
    for number, (fault, file) in enumerate(zip(LINES, files, strict=True)):
        chunk = run.chunk(number, 0)
        found = chunk["records"]
        assert [r["rollout"] for r in found] == numbers
        assert indexed or (file["count"], file["broken"], file["columns"]["turns"]) == (
            2,
            1,
            [2, 2],
        )
        said = found[1]["error"] if indexed else "; ".join(file["faults"])
        assert fault in said and len(said) < 400, (fault, said)
    assert chunk["pieces"] == {} and "only the ids" in chunk["without_pieces"]
    assert run.overview()["metrics"] == {} and run.tasks() == run.experience() == []
    search = grown(tmp_path)
    rows = [len(numbers) - 1]
    assert rows_with(search, "unusual") == dict.fromkeys(range(len(LINES)), rows)
    assert search.wrong == {} and search.done == search.of == len(LINES)
    assert len(shown(tmp_path)["run/0/index"]["files"]) == len(LINES)
    assert show(tmp_path, "--text --step 3") == show(tmp_path, "--text --step 3 --task t1") == 0
    assert "line 2: " in stdout()


INDEXES = {
    "columns.turns.0": None, "columns.turns.1": "2", "columns.tokens.0": 10**300, "columns.experience.0": 5,
    "columns.success.2": 1, "columns.score.3": float("nan"), "columns.task.0": ["t1"], "columns.fate": ...,
    "columns.other": [1, 2, 3, 4], "columns.good": [1], "members": [(0, 5, 9)], "members.0": None,
    "members.0.0": -5, "count": "4", "columns": [], "queries.t1": 5, "faults": 7, "broken": "x", "name": 5,
}  # fmt: skip
FAULTS = {  # where the place is not all that is said
    "columns.fate": "columns.fate: Field required", "columns.other": "columns.other: Extra",
    "columns.good": "good: not as many", "members": "members: not as many", "faults": "faults: Extra",
    "broken": "broken: Extra", "name": "name: Extra",
}  # fmt: skip


def test_an_index_with_values_that_no_index_has_is_told_and_made_again(tmp_path):
    made(tmp_path, steps=len(INDEXES))
    whole = Run(tmp_path).index()["files"]
    for number, (place, wrong) in enumerate(INDEXES.items(), 1):
        path = index_path(tmp_path / f"trajectories/step_{number:06d}.jsonl.gz")
        index = json.loads(gzip.decompress(path.read_bytes()))
        size = index.pop("bytes")  # which come last
        index = spoilt(index, place, wrong) | {"bytes": size}
        path.write_bytes(gzip.compress(json.dumps(index).encode()))
    files = shown(tmp_path)["run/0/index"]["files"]
    damaged = [file["faults"] for file in files if file["kind"] == "step"]
    for place, faults in zip(INDEXES, damaged, strict=True):
        assert FAULTS.get(place, place) in faults[0] and "made again" in faults[0], faults
    assert [f["columns"] for f in files] == [f["columns"] for f in whole]


@pytest.mark.parametrize(
    "text",
    ["{", "", '{"config": 5}', '{"config": [], "seed": 1}', '{"config": {}, "seed": "1"}', DEEPER,
     '{"config": {"model": ' + DEEP + "}}", '{"config": {"env": NaN}, "git": 5}', "\xff"],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_told_and_the_run_is_shown(tmp_path, text):
    made(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    overview = shown(tmp_path)["run/0/overview"]
    assert any("config.json: " in fault for fault in overview["wrong"]) and overview["facts"] == {}
    assert overview["metrics"]["step"] == [1, 2, 3]


@pytest.mark.parametrize("model", [[], 5, None, {"path": ["x"], "tokenizer": 5}])
def test_a_config_with_odd_values_is_shown_as_far_as_they_are_known(tmp_path, model):
    config = {"model": model, "env": {"name": ["travel"]}, "steps": 5, "attributing": []}
    found = shown(configured(tmp_path, config))
    assert found["run/0/overview"]["facts"] == {"steps": 5}


def test_a_path_that_no_file_can_have_is_no_tokenizer(tmp_path):
    found = shown(configured(tmp_path, {"model": {"path": "x" * 9999, "tokenizer": "a\0b"}}))
    assert "only the ids" in found["run/0/rollouts/0/0"]["without_pieces"]


def test_lines_of_other_files_that_cannot_be_read_are_told(tmp_path):
    made(tmp_path)
    good = {
        "metrics.jsonl": '{"step": 9}', "eval.jsonl": '{"policy": "p"}', "llm.jsonl": '{"role": "judge",'
        ' "what": "call", "model": "m", "step": 1}', "tasks.jsonl": '{"id": "t9", "env": "e", "query": "q"}',
        "experience/experiences.jsonl": json.dumps(new_experience("w", "c", sources=["t"]).to_dict() | {"id": "exp/9"}),
    }  # fmt: skip
    for name, line in good.items():
        wrong = ['{"step": [1], "id": 5}', "[]", DEEPER, '{"id": "t2", "sources": 5}']
        (tmp_path / name).write_text("\n".join([*wrong, line, ""]))
    found = shown(tmp_path)
    overview = found["run/0/overview"]
    for name in good:
        told = [fault for fault in overview["wrong"] if fault.startswith(name.split("/")[-1])]
        assert len(told) >= 2 and "line 2: " in " ".join(told), (name, told)
    assert overview["metrics"] == {"step": [9]} and list(overview["accounts"]) == ["judge"]
    assert [task["id"] for task in found["run/0/tasks"]] == ["t9"]
    assert [experience["id"] for experience in found["run/0/experience"]] == ["exp/9"]


def test_what_is_no_regular_file_or_does_not_end_is_told_and_never_waited_for(
    tmp_path, monkeypatch
):
    for module in ("models.files", "evolver.files.lines", "evolver.files.rollout_files"):
        monkeypatch.setattr(f"{module}.LONGEST", 1 << 16)
    monkeypatch.setattr("evolver.files.rollout_files.MOST_LINES", 1000)
    files = [tmp_path / f"trajectories/step_{step:06d}.jsonl.gz" for step in range(11)]
    for step in (1, 6, 7):
        write_rollouts(files[step], [record(0)])
    os.mkfifo(files[2])
    files[3].symlink_to("/dev/zero")
    files[4].mkdir()
    bomb = gzip.compress(b" " * (1 << 17))
    files[5].write_bytes(bomb)
    index_path(files[6]).write_bytes(bomb)
    index_path(files[7]).unlink()
    os.mkfifo(index_path(files[7]))
    files[8].symlink_to(tmp_path / "none")
    files[10].write_bytes(gzip.compress(b"\n" * 2000))
    for name in ("metrics.jsonl", "tasks.jsonl", "llm.jsonl", "config.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "eval.jsonl").symlink_to("/dev/zero")
    for path in (files[9], tmp_path / "endless.jsonl"):
        path.touch()
        os.truncate(path, 1 << 40)
    (tmp_path / "experience").mkdir()
    (tmp_path / "experience/experiences.jsonl").symlink_to(tmp_path / "endless.jsonl")
    found = shown(tmp_path)
    index = {file["step"]: file for file in found["run/0/index"]["files"]}
    faults = {step: " ".join(file.get("faults", ())) for step, file in index.items()}
    assert [step for step, file in index.items() if file["count"]] == [1, 6, 7]
    assert all("not a regular file" in faults[step] for step in (2, 3, 4))
    assert all("more text than" in faults[step] for step in (5, 10)) and "gzip" in faults[9]
    wrong = " ".join(found["run/0/overview"]["wrong"])
    assert wrong.count("not a regular file") == 5 and "more than 65,536 bytes" in wrong
    assert str(tmp_path) not in wrong + json.dumps(found["run/0/index"])  # as bundles promise
    search = grown(tmp_path)
    assert (search.done, search.of, search.wrong) == (9, 9, {})
    assert list(rows_with(search, "window").values()) == [[0]] * 3


def test_a_file_of_lines_that_are_no_rollouts_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("evolver.files.rollout_files.MOST_BROKEN", 3)
    path = tmp_path / "trajectories/step_000001.jsonl.gz"
    written(path, [json.dumps(record(0)), *"xxxxxx", json.dumps(record(1))])
    (file,) = Run(tmp_path).index()["files"]
    assert file["count"] == 1 and len(file["faults"]) == 4
    assert "line 4: so many lines cannot be read" in file["faults"][-1]


def test_files_of_odd_names_are_shown_and_a_search_goes_on_past_them(tmp_path, stdout):
    whole = made(tmp_path) / "trajectories/step_000001.jsonl.gz"
    for name in (b"step_" + b"9" * 200, "step_٣".encode(), b"<img src=x>\n", b"a\xff"):
        shutil.copy(whole, whole.with_name(os.fsdecode(name + b".jsonl.gz")))
    files = shown(tmp_path)["run/0/index"]["files"]
    assert len(files) == 8 and {f["step"] for f in files} == {1, 2, 3, None}
    assert show(tmp_path, "--text") == 0 and "of step 3" in stdout()
    search = grown(tmp_path)
    assert (search.done, search.of, list(search.wrong)) == (7, 8, ["a\udcff.jsonl.gz"])
    assert len(rows_with(search, "window")) == 7


ENDLESS = (
    "WITH RECURSIVE t(id, name, bytes, changed) AS (SELECT 1, 'a', 1, 1 UNION ALL"
    " SELECT id + 1, 'a', 1, 1 FROM t) SELECT * FROM t"
)


@pytest.mark.parametrize(
    "statements",
    [[f"CREATE VIEW file AS {ENDLESS}"], ["CREATE TABLE words (text)"], ["CREATE TABLE file (id)"],
     ["CREATE TABLE file (id INTEGER PRIMARY KEY, name, bytes, changed)",
      f"CREATE TRIGGER slow AFTER INSERT ON file BEGIN INSERT INTO file {ENDLESS}; END"]],
)  # fmt: skip
def test_a_data_base_that_is_no_index_of_words_is_made_anew_and_never_waited_for(
    tmp_path, statements
):
    (made(tmp_path) / ".view").mkdir()
    foreign = sqlite3.connect(tmp_path / ".view/words.sqlite")
    for statement in statements:
        foreign.execute(statement)
    foreign.commit()
    foreign.close()
    search = grown(tmp_path)
    assert search.done == 4 and len(rows_with(search, "window")) == 4
    search.close()


def test_the_thread_that_indexes_outlives_any_error_and_pages_are_told(tmp_path, monkeypatch):
    broken = [True, True]

    def grow(search):
        if broken:
            broken.pop()
            raise RecursionError("too deep")
        return whole(search)

    whole = Search.grow
    monkeypatch.setattr(Search, "grow", grow)
    for name in ("EVERY", "QUIET"):
        monkeypatch.setattr(f"experiments.view.server.{name}", 0.2)
    with served(made(tmp_path)) as server:
        found = {}
        for wanted in (["RecursionError: too deep"], []):
            until = time.monotonic() + 30
            while found.get("wrong") != wanted and time.monotonic() < until:
                time.sleep(0.3)
                _, found = ask(server, "/api/run/0/search?q=window")
            assert found["wrong"] == wanted
        assert len(found["files"]) == 4


def test_a_search_goes_on_past_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    search = Search(Run(made(tmp_path)))
    read = search.run.records

    def records(file: int, member: int) -> list[dict]:
        if file == 1:
            raise OSError("the disk is broken")
        return read(file, member)

    monkeypatch.setattr(search.run, "records", records)
    search.grow()
    found = search.find("window")
    assert list(found["files"]) == [0, 2, 3] and found["wrong"] == ["the disk is broken"]
    monkeypatch.setattr(search.run, "records", read)
    search.grow()  # as every few seconds
    found = search.find("window")
    assert sorted(found["files"]) == [0, 1, 2, 3] and found["wrong"] == []


def test_whole_numbers_arrive_as_they_are(tmp_path):
    seed = 6384315726636232212
    exact = spoilt(record(0, seed=seed), "turns.0.info", {"id": [2**53 + 1, 5]})
    configured(tmp_path, {"steps": 2**60}, seed=seed)
    Workdir(tmp_path).log_trajectories(4, [exact])
    task = {"id": "t1", "env": "toy", "query": "q", "seed": -seed, "meta": {"walk": 2**64}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    found = shown(tmp_path)
    (rollout,) = found["run/0/rollouts/4/0"]["records"]
    assert rollout["seed"] == str(seed) and rollout["rollout"] == 0
    assert rollout["turns"][0]["info"] == {"id": [str(2**53 + 1), 5]}
    assert rollout["turns"][0]["tokens"] == [5, 6]
    overview = found["run/0/overview"]
    assert overview["seed"] == str(seed) and overview["facts"]["steps"] == str(2**60)
    assert found["run/0/tasks"][0]["seed"] == str(-seed)
    assert found["run/0/tasks/0"][0]["meta"] == {"walk": str(2**64)}


TOUCH = ["touch", "MARK"]  # in the working directory
CODE = [
    {"name": "os:system", "args": {"command": "touch MARK"}},
    {"name": "subprocess:Popen", "args": {"args": TOUCH}},
    {"name": "evil:World"}, {"name": "evil"}, {"name": "travel:World"}, {"name": "../evil:World"},
    {"name": "mcp", "args": {"command": TOUCH}}, {"name": "gym", "args": {"env": "evil:E-v0"}},
    {"name": "appworld", "args": {"root": "."}}, {"name": ["os:system"]}, {"name": {"travel": 1}},
    {"name": "os:system", "args": {"command": "touch MARK"}, "mode": "worker", "python": "./evil"},
    {"name": "travel", "mode": "http", "url": "http://127.0.0.1:9"},
]  # fmt: skip


def stranger(folder: Path, env: object) -> Path:
    """The workdir of a run in a world of that config, with code that leaves a mark beside it."""
    configured(folder, {"env": env})
    code = "open('MARK', 'w')\nimport envs\nWorld = envs.world_class('travel')\n"
    for name in ("evil.py", "travel.py"):
        (folder / name).write_text(code)
    (folder / "evil").write_text("#!/bin/sh\ntouch MARK\n")
    (folder / "evil").chmod(0o755)
    return folder


@pytest.mark.parametrize("env", CODE)
def test_a_folder_names_no_code_that_a_replay_would_run(tmp_path, monkeypatch, stderr, env):
    monkeypatch.chdir(stranger(tmp_path, env))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert command.main(["view", ".", "--replay", "5"]) == 1
    said = stderr()
    assert "add --trust" in said and "Traceback" not in said
    assert command.main(["view", ".", "--text"]) == 0
    assert not (tmp_path / "MARK").exists() and str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    "env", [5, [], {}, {"name": "travel", "args": [1]}, {"name": "travel", "mode": 5}]
)
def test_a_world_that_no_config_has_is_one_message(tmp_path, stderr, env):
    assert show(stranger(tmp_path, env), "--replay 5") == 1
    said = stderr()
    assert said.startswith(str(tmp_path)) and said.count("\n") == 1


@pytest.mark.parametrize("words", ["--replay 1", "--replay 1 --trust"])
def test_an_interpreter_is_never_taken_from_a_file(tmp_path, monkeypatch, words):
    env = {"name": "travel", "mode": "worker", "python": "./evil"}
    monkeypatch.chdir(stranger(tmp_path, env))
    assert show(Path(), words) == 0 and not (tmp_path / "MARK").exists()


def test_a_folder_that_is_trusted_may_name_a_world_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(stranger(tmp_path, {"name": "evil:World"}))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert show(Path(), "--replay 1 --trust") == 0 and (tmp_path / "MARK").exists()


@pytest.mark.parametrize(
    "config",
    [{"env": CODE[0]}, {"env": {"python": "./evil"}}, {"llm": 5}, {"llm": {"url": []}}, {"model": []},
     {"env": CODE[6], "llm": {"judge": {"url": {}}}}, {"steps": {}}, {}],
)  # fmt: skip
def test_a_run_that_is_resumed_takes_nothing_to_run_from_the_workdir(tmp_path, monkeypatch, config):
    monkeypatch.chdir(stranger(tmp_path, {}))
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    found = list(workdir_problems(quickstart.get_config(), tmp_path, "train", base.Config))
    assert any("holds a run of another config" in problem for problem in found)
    assert not (tmp_path / "MARK").exists()


def test_the_index_of_words_is_never_written_through_a_link(tmp_path):
    foreign = sqlite3.connect(tmp_path / "other.sqlite")
    foreign.execute("CREATE TABLE file (mine)")
    foreign.commit()
    run = made(tmp_path / "run")
    (run / ".view").mkdir()
    (run / ".view/words.sqlite").symlink_to(tmp_path / "other.sqlite")
    search = grown(run)
    assert rows_with(search, "window")
    search.close()
    assert list(foreign.execute("SELECT sql FROM sqlite_master")) == [("CREATE TABLE file (mine)",)]
    foreign.close()
