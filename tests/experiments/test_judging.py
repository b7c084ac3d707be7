"""Judges beside replay: what is counted, controls, and what is refused."""

import numpy as np

from envs.world import Evaluation
from evolver.attributing import ABSTAIN, BAD, GOOD, Label, TurnJudge
from evolver.files.lines import read_jsonl
from evolver.questioning import OutcomeJudge
from experiments import judging
from tests.experiments.results import rows_of

HERE = "tests.experiments.test_judging"


class Lenient(TurnJudge):
    """Calls every turn GOOD, but abstains on the first one of each episode."""

    def label(self, trajectories):
        first, others = [Label(ABSTAIN)], [Label(GOOD)]
        return [first + others * (len(t.turns) - 1) for t in trajectories]


class ByOutcome(TurnJudge):
    """Calls every turn what the control `outcome` calls it."""

    def label(self, trajectories):
        return [[Label(GOOD if t.evaluation.success else BAD)] * len(t.turns) for t in trajectories]


class Short(OutcomeJudge):
    """Calls episodes of one turn a success and others a failure, but cannot judge the second
    rollout of a task."""

    def score(self, trajectories):
        verdicts = {True: Evaluation(1.0, True), False: Evaluation(0.0, False)}
        return [
            "no answer" if t.rollout == 1 else verdicts[len(t.turns) == 1] for t in trajectories
        ]


def measure(tiny, workdir, *words, judges=(f"{HERE}:Lenient", f"{HERE}:ByOutcome")) -> int:
    command = f"--config={tiny} --workdir={workdir} --tasks=6 --rollouts=4 --judges"
    return judging.main([*command.split(), *judges, *words])


def test_judges_and_controls_beside_replay(tiny, tmp_path):
    assert measure(tiny, tmp_path) == 0
    rows = rows_of((tmp_path / "judging.md").read_text())
    names = [f"{HERE}:Lenient", f"{HERE}:ByOutcome", "outcome", "shuffled"]
    assert list(rows) == ["judge of turns", *names]
    assert rows[f"{HERE}:ByOutcome"] == rows["outcome"] and rows["outcome"][0] == "100.0"
    turns = list(read_jsonl(tmp_path / "labels.jsonl"))
    assert len({(t["task"], t["rollout"], t["turn"]) for t in turns}) == len(turns) > 0
    labels = {name: [t["labels"][name] for t in turns] for name in turns[0]["labels"]}
    assert sorted(labels["shuffled"]) == sorted(labels["replay"])
    assert labels[f"{HERE}:Lenient"] == [ABSTAIN if t["turn"] == 0 else GOOD for t in turns]


def test_judges_of_outcomes_beside_the_world(tiny, tmp_path):
    outcomes = ("--outcomes", f"{HERE}:Short", "verifier")
    assert measure(tiny, tmp_path, *outcomes, judges=()) == 0
    rows = rows_of((tmp_path / "judging.md").read_text())
    assert list(rows) == ["judge of outcomes", f"{HERE}:Short", "verifier", "failed", "shuffled"]
    assert rows["verifier"][1].startswith("100.0") and rows["verifier"][4] == "100.0"
    assert rows["failed"][2:4] == ["0.0", "100.0"] and rows[f"{HERE}:Short"][0] == "75.0"
    episodes = list(read_jsonl(tmp_path / "outcomes.jsonl"))
    assert len(episodes) == 24 and {e["world"] for e in episodes} <= {0.0, 0.5, 1.0}
    assert all((e[f"{HERE}:Short"] == "no answer") == (e["rollout"] == 1) for e in episodes)
    assert measure(tiny, tmp_path / "none", judges=()) == 2


def test_cells():
    replay = np.array([GOOD, GOOD, BAD, BAD, ABSTAIN, GOOD])
    judge = np.array([GOOD, BAD, BAD, ABSTAIN, GOOD, GOOD])
    tasks = np.array(["a", "a", "a", "a", "b", "b"])
    labelled, agrees, good, bad, balanced = judging.cells(judge, replay, tasks)
    assert (labelled, good, bad, balanced) == ("80.0", "66.7", "100.0", "83.3")
    assert agrees.startswith("83.3 [")  # the mean of 2/3 and 1
    assert judging.cells(np.full(6, ABSTAIN), replay, tasks) == ["0.0", "", "", "", ""]


def test_what_is_refused(tiny, tmp_path, stderr):
    assert measure(tiny, tmp_path, "--tasks=-1", judges=("nobody",)) == 2
    told = stderr()
    assert "--tasks must be at least 0" in told and "nobody" in told
    assert not (tmp_path / "labels.jsonl").exists()
    assert measure(tiny, tmp_path, judges=("llm",)) == 2
    assert "config.llm" in stderr()
