"""Rollouts on disk: what is written comes back, small, by parts, and from files that others wrote
or a crash cut."""

import gzip
import json
from dataclasses import replace
from itertools import chain
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.toolcalls import call_text
from envs.world import Evaluation, Task
from evolver.build import RunError
from evolver.files import rollout_files as files
from evolver.files.lines import KeptLines
from evolver.files.rollout_files import (
    RolloutFile,
    index_path,
    read_rollouts,
    record_of,
    rollout_files,
    write_rollouts,
)
from evolver.files.workdir import Workdir
from evolver.phases import record as record_phase
from evolver.phases.learning import note_tokens
from evolver.phases.record import Recorder
from experiments.view.text import rollout_lines
from models.files import BrokenFile, Written, dumps
from rl.packing import pack
from rl.samples import samples
from rl.trajectory import Completion, StopReason, Trajectory, Turn

HOSTILE = "<script>alert(1)</script>\x00\x1b[31m\u202eabc\u2028\ud800" + "x" * 5000


def rollout(number=0, *, turns=2, text="look", label=1):
    found = []
    prompt = [1, 2]
    for k in range(turns):
        completion = Completion([3 + k, 4 + k], [-0.25, -0.00001], "stop", 7)
        answer = [{"role": "tool", "content": text}]
        found.append(Turn([*prompt], completion, text, answer, label=label, advantage=0.5))
        prompt += [*completion.tokens, 9]
    task = Task(f"t{number % 3}", "toy", "Book it.", difficulty=2)
    opening = [{"role": "user", "content": "Book it."}]
    score = Evaluation(1.0, True)
    return Trajectory(task, number, 11, opening, found, StopReason.DONE, score)


def record(*numbers, **kind):
    """Return the record of a rollout that trained."""
    return record_of(rollout(*numbers, **kind), fate="trained")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(), max_size=12), st.integers(1, 4000))
@example([HOSTILE], 4000)
def test_records_come_back_whole_and_by_member(tmp_path_factory, texts, member):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "trajectories" / "step_000001.jsonl.gz"
    written = [record(i, text=text) for i, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MEMBER", member)
        write_rollouts(path, written)
    (file,) = rollout_files(folder)
    index = json.loads(file.index_text())
    assert (file.kind, file.step, index["count"]) == ("step", 1, len(written))
    parts = [file.lines(offset, length) for offset, length, _ in index["members"]]
    assert [lines for _, _, lines in index["members"]] == [len(part) for part in parts]
    assert [*chain.from_iterable(parts)] == read_rollouts(path) == written
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "surrogatepass")
    assert [json.loads(line) for line in text.split("\n") if line] == written


def test_answers_are_read_as_the_worlds_read_them():
    call = call_text("look", {})
    played = rollout(text=f"<think>{call}</think> Rome")
    played.task.reference = [played.turns[-1].action]
    read = record_of(played, fate="trained")
    assert (read["expected"], read["given"]) == ("Rome", "Rome")


def test_an_index_says_what_the_rollouts_say_and_a_stale_one_is_not_believed(tmp_path):
    path = tmp_path / "step_000003.jsonl.gz"
    found = [record(i, turns=i + 1, label=i - 1) for i in range(3)]
    found[1]["turns"][0]["reason"] = "nothing shows it"
    write_rollouts(path, found)
    index = json.loads(RolloutFile(path).index_text())
    made = RolloutFile(path).make_index()
    columns = index["columns"]
    assert columns == made["columns"] and columns["advantage"] == [0.5] * 3
    assert columns["tokens"] == [2, 4, 6] and columns["turns"] == [1, 2, 3]
    assert columns["bad"] == [1, 0, 0] and columns["good"] == [0, 0, 3]
    assert columns["abstained"] == [[], ["nothing shows it"], []]
    assert index["queries"] == {"t0": "Book it.", "t1": "Book it.", "t2": "Book it."}
    body = path.read_bytes()
    path.write_bytes(body[: len(body) // 2])  # a copy that was cut: the index is of another file
    assert RolloutFile(path).index_text() is None
    path.write_bytes(body)
    index_path(path).write_bytes(b"\x1f\x8bnonsense")
    assert RolloutFile(path).index_text() is None


def test_damaged_lines_are_counted_and_read_around(tmp_path):
    folder = tmp_path / "trajectories"
    good = record(turns=1)
    line = json.dumps(good)
    text = f'{line}\n{{"task": "b", "tur\n[1]\n{{"task": "c"}}\n{line}\n'.encode()
    for name, data in (
        ("step_000002", gzip.compress(text)), ("eval_1", gzip.compress(text)[:-6]), ("held_out_000000", b"x"),
    ):  # fmt: skip
        write_rollouts(folder / f"{name}.jsonl.gz", [])
        (folder / f"{name}.jsonl.gz").write_bytes(data)
    held_out, step, cut = rollout_files(tmp_path)
    names = [(file.kind, file.step) for file in (held_out, step, cut)]
    assert names == [("held_out", 0), ("step", 2), ("eval_1", None)]
    index = step.make_index()
    assert (index["count"], index["broken"]) == (2, 3)
    ((offset, length, lines),) = index["members"]
    read = [line for line in step.lines(offset, length) if isinstance(line, dict)]
    assert read == [good] * lines and index["columns"]["good"] == [1, 1]
    assert cut.make_index()["count"] == 2  # only the checksum is missing
    assert held_out.make_index()["count"] == 0
    assert [type(line) for line in held_out.lines(0, 1)] == [str]
    with pytest.raises(BrokenFile, match=r"step_000002\.jsonl\.gz, line 2"):
        read_rollouts(step.path)


@pytest.mark.parametrize(
    ("task", "stop", "last", "answers"),
    [
        ({"verifier": {"answer": "7"}}, "done", "6", ("7", "6")),
        ({"verifier": {"answer": {"value": "7", "others": []}}}, "done", "6", ("7", "6")),
        ({"verifier": {"answer": None}, "reference": ["7"]}, "done", "6", ("", "")),
        ({"verifier": {}, "reference": ["<tool_call>x", "7"]}, "done", "6", ("7", "6")),
        ({"verifier": {}, "reference": ["<tool_call>x"]}, "done", "6", ("", "")),
        ({"verifier": {"answer": 7}}, "max_turns", "6", ("7", "")),
        ({"verifier": {"answer": 7}}, "done", {"answer": "5"}, ("7", "5")),
        ({"verifier": {"answer": 7}}, "done", {"calls": [{"name": "end"}]}, ("7", "")),
    ],
)
def test_a_record_holds_the_expected_answer_beside_the_one_given(task, stop, last, answers):
    trajectory = rollout(text="6")
    trajectory.stop = StopReason(stop)
    vars(trajectory.task).update(task)
    if isinstance(last, dict):
        trajectory.turns[-1].info = last
    trajectory.turns[0].outcome_advantage = 0.125
    read = record_of(trajectory, fate="trained")
    assert (read["expected"], read["given"]) == answers
    first, second = read["turns"]
    assert first["outcome_advantage"] == 0.125 and "outcome_advantage" not in second


def test_an_advantage_that_is_not_finite_is_kept_as_unknown(tmp_path):
    trajectory = rollout(0, turns=2)
    trajectory.turns[0].advantage = trajectory.turns[0].outcome_advantage = float("inf")
    Workdir(tmp_path).log_trajectories(3, [record_of(trajectory, fate="trained")])
    (path,) = tmp_path.rglob("*.jsonl.gz")
    index = json.loads(RolloutFile(path).index_text())
    made = RolloutFile(path).make_index()
    assert index["columns"]["advantage"] == made["columns"]["advantage"] == [None]
    (read,) = read_rollouts(path)
    first, second = (line for line in rollout_lines(read, 80) if line.startswith("turn "))
    assert "advantage not finite" in first and "advantage +0.500" in second


def test_a_rollout_takes_less_room_than_its_plain_line(tmp_path):
    path = tmp_path / "step_000001.jsonl.gz"
    found = [record(i, turns=5) for i in range(128)]
    write_rollouts(path, found)
    plain = sum(len(json.dumps(record)) for record in found)
    assert path.stat().st_size + index_path(path).stat().st_size < plain / 4


def test_tasks_are_written_again_only_where_they_changed():
    """A run may have very many of them, and saves every few steps."""
    tasks = [Task(f"t{n}", "toy", "Find it.") for n in range(2)]
    pool = mock.Mock(tasks={"t1": tasks[1]})
    pool.card.return_value = "card"
    recorder = mock.MagicMock(_listed=([], ""))
    run = recorder.run
    run.tasks.originals = tasks[:1]
    run.tasks.pool = pool
    run.navigating = None
    run.recipe.arrays.return_value = {}
    run.learner.saved = {}
    for _ in range(2):
        Recorder.save(recorder)
    run.workdir.log_tasks.assert_called_once_with(tasks, "card")
    pool.tasks = {"t1": replace(tasks[1], query="Find it again.")}
    Recorder.save(recorder)
    assert run.workdir.log_tasks.call_count == 2 and recorder.checkpoints.save.call_count == 3


def test_kept_lines_are_written_like_the_records_themselves():
    lines, records = KeptLines(), [{"text": HOSTILE, "n": n, "of": {"deep": [n]}} for n in range(9)]
    for _ in range(6):
        value = {"a": [records, "0"], "b": HOSTILE}
        assert dumps(value | {"a": [Written(lines.of(records)), "0"]}) == json.dumps(value)
        assert dumps([Written([])]) == "[[]]"
        records = [{"text": "new", "n": -1, "of": {}}, *records[2:]]  # the first was forgotten
    with pytest.raises(TypeError, match="object is not JSON serializable"):
        dumps({"a": object()})


def test_a_state_that_is_still_equal_is_not_copied_again(monkeypatch):
    """That of an explorer takes longer than all other records of a step."""
    plug = mock.Mock()
    plug.state.side_effect = lambda: {"seen": [1, 2]}
    monkeypatch.setattr(record_phase, "remembering", lambda run: {"sampler": plug})
    first = record_phase.states(None, {})
    assert record_phase.states(None, first)["sampler"] is first["sampler"] == {"seen": [1, 2]}
    # A file would give back the one as a list, and cannot hold the other.
    for seen in ((1, 2), np.arange(2)):
        plug.state = mock.Mock(return_value={"seen": seen})
        with pytest.raises(RunError, match="sampler"):
            record_phase.states(None, first)


def test_each_turn_gets_the_gap_and_the_ratio_of_its_own_tokens():
    trajectories = [rollout(i, turns=i + 1) for i in range(4)]
    turns = [*chain.from_iterable(trajectory.turns for trajectory in trajectories)]
    for turn in turns:
        turn.completion.logprobs = list(-np.random.default_rng(len(turn.prompt)).random(2))
    trajectories[2].turns[1].prompt = [50, 51]  # the context was rewritten: another sample starts
    batch = pack([*chain.from_iterable(map(samples, trajectories))], 24)
    batch.turns = tuple(turns)
    # Each token's values say which token it is.
    positions = np.where(batch.mask_RT, batch.tokens_RT, 0).astype(np.float32)
    batch.old_logp_RT = batch.logp_RT + positions / 1000
    note_tokens(batch, batch.old_logp_RT + np.log1p(positions / 100))
    for turn in turns:
        assert turn.gap == pytest.approx(np.array(turn.completion.tokens) / 1000, abs=1e-6)
        assert turn.ratio == pytest.approx(1 + np.array(turn.completion.tokens) / 100, abs=1e-5)
    kept = record_of(trajectories[0], fate="trained")["turns"][0]
    assert kept["gap"] == [0.003, 0.004] and kept["ratio"] == [1.03, 1.04]
