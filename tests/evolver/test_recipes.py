"""What a step is can be changed in one class, and what a plug remembers survives a resume."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from envs.world import Evaluation, Task
from evolver.config import plugs
from evolver.files.rollout_files import rollout_files
from evolver.files.workdir import Workdir
from evolver.imitating import turns_of
from evolver.parts import Parts
from evolver.recipes import Recipe
from evolver.recipes.demonstrated import Demonstrated
from evolver.recipes.sirius import Sirius
from tests.evolver.runs import figures, rollouts_of
from tests.rl.test_samples import trajectory, turn
from tests.tiny import Parity

HERE = "tests.evolver.test_recipes"


class Solved(Parity):
    """Parity whose tasks have a reference. An episode whose prompt names it succeeds, others as
    Parity says."""

    def tasks(self, split):
        return [dataclasses.replace(t, reference=["even"]) for t in super().tasks(split)]


class Backwards(Recipe):
    """Choose the tasks by what the last step was: in turn the first and the last three."""

    def __init__(self, parts):
        super().__init__(parts)
        self.seen = []

    def choose(self, run, step):
        _, metrics = super().choose(run, step)
        tasks = run.tasks.originals
        self.seen = [*self.seen, tasks[len(self.seen) % 2].id]
        return {step: tasks[:3] if len(self.seen) % 2 else tasks[3:]}, metrics

    def metrics(self):
        return {"seen": len(self.seen)}

    def state(self):
        return self.seen

    def load_state(self, state):
        self.seen = state


class Moving:
    """An estimator with a baseline that it remembers."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, batch):
        advantage_N = batch.outcome_N - self.mean
        self.mean = 0.5 * self.mean + 0.5 * float(batch.outcome_N.mean())
        return advantage_N

    def state(self):
        return {"mean": self.mean}

    def load_state(self, state):
        self.mean = state["mean"]


class Unkept(Moving):
    def state(self):
        return {"mean": (self.mean,)}  # JSON makes a list of it


class Half:
    def __call__(self, batch): ...

    def state(self): ...


def fined(batch):
    return batch.outcome_N - 0.1 * batch.turns_N


class Unmade(Recipe):
    def __init__(self, parts): ...


class Weighing(Recipe):
    """Train with an advantage of its own for each token, and count what is no number."""

    def choose(self, run, step):
        self.figures["named"], self.figures["counted"] = "a text", step
        return super().choose(run, step)

    def weigh(self, batches):
        for batch in batches:
            batch.advantage_RT = np.where(batch.mask_RT, np.arange(batch.mask_RT.shape[1]), 0.0)
        return {}


def test_a_recipe_that_was_not_set_up_is_refused_before_anything_runs(ends):
    said = ends(1, f"recipe.name={HERE}:Unmade")
    assert "Unmade.__init__ has to call super().__init__(parts)" in said


def test_advantages_of_tokens_are_recorded_and_a_figure_that_is_no_number_is_said(finish, capsys):
    run = finish("run", f"recipe.name={HERE}:Weighing eval.every=0 steps=2")
    assert "the metric named is left out: a plug gave 'a text'" in capsys.readouterr().out
    metrics = Workdir(run).metrics()
    assert [line.get("counted") for line in metrics] == [None, 1, 2]
    trained = [r for r in rollouts_of(run, 1) if r["fate"] == "trained"]
    for one in itertools.chain.from_iterable(r["turns"] for r in trained):
        assert np.diff(one["advantages"]).tolist() == [1.0] * (len(one["tokens"]) - 1)


PLUGS = (
    f"recipe.name={HERE}:Backwards sampler.name=failures reward.name={HERE}:fined eval.every=0"
    f" loss.kl_coef=0.1 loss.renew_reference=2 advantage.name={HERE}:Moving"
)


def test_what_plugs_remember_is_resumed_bit_for_bit(finish):
    runs = [finish("whole", PLUGS), finish("parts", PLUGS, "steps=2")]
    finish("parts", PLUGS)
    whole, parts = map(figures, runs)
    # Just before it is renewed, the reference is two steps old, and before that it is the policy.
    gaps = [line["kl_ref"] for line in whole[1:]]
    assert gaps[3] > 0 and gaps[2] < gaps[3] / 2
    for r in rollouts_of(runs[0], 1):
        assert r["reward"] == r["score"] - 0.1 * len(r["turns"])
    assert whole == parts and [line.get("seen") for line in whole] == [None, 1, 2, 3, 4]
    for step in (3, 4):
        records, again = (rollouts_of(run, step) for run in runs)
        assert records == again
        assert {r["task"] for r in records} == {f"train/{i + 3 * (step == 4)}" for i in range(3)}


@pytest.mark.parametrize(
    "key, name, words",
    [
        ("advantage", "Half", "lacks load_state()"),
        ("loss", "Moving", "a run cannot resume a loss"),
        ("recipe", "Half", "lacks choose(), roll_out()"),
    ],
)
def test_a_plug_that_cannot_resume_is_refused(key, name, words):
    (message,) = plugs.problems(key, f"{HERE}:{name}", {})
    assert words in message


def test_a_state_that_a_file_would_change_is_refused_before_anything_runs(ends, tmp_path):
    said = ends(1, f"advantage.name={HERE}:Unkept")
    assert "config.advantage: Unkept.state() has to return JSON values" in said
    assert not (tmp_path / "run/metrics.jsonl").exists()


class Marked(Sirius):
    """SiriuS in a world of random policies: every second repair succeeds, and no first attempt but
    the first of each task."""

    def roll_out(self, run, chosen, step):
        trajectories, metrics = super().roll_out(run, chosen, step)
        for t in trajectories:
            t.evaluation = Evaluation(float(t.rollout == 0), t.rollout == 0)
        return trajectories, metrics

    def repair(self, run, failure, number, step):
        job = super().repair(run, failure, number, step)
        assert job.experience == [("sirius/feedback", "Say: even")]
        return job


def test_sirius_trains_on_successes_and_on_repaired_failures_alone(finish):
    words = f"env.name={HERE}:Solved recipe.name={HERE}:Marked recipe.args.attempts=2 loss.name=nll"
    less = "eval.every=0 steps=1 learner.updates=1 optim.lr=1e-9"
    run = finish("run", words, less, "--config.recipe.args.feedback=Say: {solution}")
    line, own, extra = figures(run)[1], rollouts_of(run, 1), rollouts_of(run, "extra_000001")
    assert [r["fate"] for r in own] == ["trained", *["no_signal"] * 3] * 3
    assert line["ledger/trained"] == 3 and line["ledger/no_signal"] == 9 == line["sirius/failed"]
    assert line["ledger/rollouts"] == line["rollout/count"] == 12
    for name in ("ledger/extra", "ledger/extra_trained", "sirius/repaired"):
        assert line[name] == len(extra)
    assert 0 < len(extra) < 18 and all(r["success"] and r["fate"] == "trained" for r in extra)
    assert all(r["experience"][0]["content"] == "Say: even" for r in extra)
    trained = [turn for r in [own[0], own[4], own[8], *extra] for turn in r["turns"]]
    assert all(turn["advantage"] == 1 for turn in trained)
    tokens = [len(turn["tokens"]) for turn in trained]
    assert line["trained_tokens"] == sum(tokens)
    # The paper's objective: the mean negative log-likelihood of what succeeded, without the
    # feedback. `gap` is what its removal changes.
    logp = [sum(turn["logprobs"]) + sum(turn["gap"]) for turn in trained]
    assert line["loss"] == pytest.approx(-sum(logp) / sum(tokens), abs=1e-3)
    assert {file.kind for file in rollout_files(run)} == {"step", "extra"}
    Workdir(run).rewind(0)
    assert not rollout_files(run)


def demonstrated(folder):
    """Return the arguments of a run that demonstrates, and write its tasks."""
    tasks = [
        Task(f"made/{i}", "parity", f"Write {i}.", origin="synthetic", verifier={"even": True},
             reference=["even", "even"])
        for i in range(6)
    ]  # fmt: skip
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(task.to_dict()) + "\n" for task in tasks))
    return (
        "recipe.name=demonstrated recipe.args.solutions=4 recipe.args.weight=0.5 eval.every=0"
        f" questioning.enabled=True questioning.tasks={file} questioning.share=1.0"
        " loss.old_logp=sampled learner.updates=1"
    )


def test_what_no_rollout_solved_is_demonstrated_first(tmp_path, finish):
    run = finish("run", demonstrated(tmp_path), "steps=2")
    for step in (1, 2):
        line, own = figures(run)[step], rollouts_of(run, step)
        extra = rollouts_of(run, f"extra_{step:06d}")
        failed = {r["task"] for r in own} - {r["task"] for r in own if r["success"]}
        assert failed and {r["task"] for r in extra[: len(failed)]} == failed
        assert line["ledger/extra"] == line["ledger/extra_trained"] == len(extra) == 4
        assert line["ledger/rollouts"] == 12 and line["skipped"] == 0
        assert line["demonstrated/failed"] == len(failed) and line["demonstrated/lost"] == 0
        assert len({r["task"] for r in extra}) == 4
        turns = [turn for r in extra for turn in r["turns"]]
        assert [turn["action"] for turn in turns] == ["even"] * 8
        assert {turn["advantage"] for turn in turns} == {0.5}
    # The ratio is taken to the policy itself, so it is 1, and the loss of a token is -weight.
    assert figures(run)[1]["loss/guided"] == pytest.approx(-0.5, abs=0.05)


def test_without_negative_advantages_only_what_did_better_than_its_group_trains(tmp_path, finish):
    words = f"{demonstrated(tmp_path)} rollout.group=8 steps=1"
    runs = [finish(n, words, f"recipe.args.negative={n}") for n in ("1.0", "0.5", "0.0")]
    advantages = [
        [[turn["advantage"] for turn in r["turns"]] for r in rollouts_of(run, 1)] for run in runs
    ]
    flat, halved, positive = (list(itertools.chain(*one)) for one in advantages)
    assert min(flat) < 0 < max(flat)
    assert halved == pytest.approx([a if a > 0 else a / 2 for a in flat])
    assert positive == pytest.approx([max(a, 0) for a in flat])
    better = sum(max(one, default=0) > 0 for one in advantages[0])
    all_train, _, line = (figures(run)[1] for run in runs)
    assert line["ledger/trained"] == better < all_train["ledger/trained"]
    assert line["ledger/no_signal"] == line["ledger/rollouts"] - better


def test_what_labels_praise_in_failures_counts_as_negative_advantages_do(monkeypatch):
    """A turn that is praised in a failure would be imitated, and the failure's blame left out."""
    monkeypatch.setattr(Recipe, "credit", lambda *given: None)
    given = [(0.7, 1.0), (-0.2, 1.0), (0.3, -1.0), (0.4, 0.0), (0.5, None), (-0.6, None)]
    for negative, expected in ((1.0, [0.7, -0.2, 0.3, 0.4, 0.5, -0.6]), (0.0, [0.7, 0.5])):
        turns = [turn([1], [2], advantage) for advantage, _ in given]
        for one, (_, outcome) in zip(turns, given):
            one.outcome_advantage = outcome
        Demonstrated(Parts(), negative=negative).credit(None, [trajectory(*turns)], 1)
        assert [one.advantage for one in turns if one.advantage] == expected


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "demonstrated loss.guided_prompt=guided",
            [
                "demonstrated trains on demonstrations", "guided_prompt=stripped",
                "demonstrated trains on solutions", "config.questioning.enabled=True",
            ],
        ),
        ("coevolve", ["config.questioning.every above 0"]),
        ("evolutionary", ["questioning.enabled=True"]),
        (  # what proposes tasks of its step needs rollouts of that step
            "dual_role rollout.async_depth=1",
            ["within it: set config.rollout.async_depth=0"],
        ),
    ],
)  # fmt: skip
def test_a_recipe_is_refused_without_what_it_needs(ends, words, said):
    problems = ends(2, f"recipe.name={words}")
    assert all(text in problems for text in said)


class Untrue(Parity):
    """Parity that fails on one task, and judges the others otherwise than it was explored."""

    def step(self, action):
        if self.task.id == "made/0":
            raise OSError("the disk is full")
        return super().step(action)

    def reset(self, task, seed=0):
        self.task = task
        return super().reset(task, seed)

    def evaluate(self):
        return Evaluation(0.0, False)


async def failing(*_):
    raise ValueError("no chat")


@pytest.mark.parametrize(
    "world, template, said",
    [
        (f"env.name={HERE}:Untrue", turns_of, "a solution fails: "),
        ("", failing, "a solution fails: ValueError: no chat"),  # does not end the run either
    ],
)
def test_a_demonstration_that_fails_is_left_out_counted_and_shown(
    world, template, said, tmp_path, monkeypatch, capsys, finish
):
    monkeypatch.setattr("evolver.recipes.demonstrated.turns_of", template)
    run = finish("run", demonstrated(tmp_path), world, "steps=1")
    line = figures(run)[1]
    assert line["demonstrated/lost"] == 4 and "ledger/extra" not in line
    assert f"step 1: {said}" in capsys.readouterr().out
