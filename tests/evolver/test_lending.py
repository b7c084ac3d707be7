"""Invented tasks teach: hidden rules are not named, and no guess solves a task."""

import dataclasses

import pytest

from docs.examples.lending import Lending
from envs.probed import probed
from envs.toolcalls import call_text
from envs.world import Observation, Task, tool_of
from evolver.phases.tasks import invent
from evolver.questioning import TaskPool, synthetic_task
from evolver.questioning.calls import Event, operations_of
from evolver.questioning.goals import Goal
from evolver.questioning.phrasing import Phrasing
from evolver.questioning.tasks import answer_of, constants, is_guessable
from evolver.replaying import calls_of
from tests.evolver.explorers import curious, needs, run_of, solves


@pytest.fixture(scope="module")
def questioning():
    made = curious(Lending)
    made.explore(seed=1, budget=60)
    return made


@pytest.fixture(scope="module")
def tasks(questioning):
    return list(questioning.pool.tasks.values())


def test_a_loan_to_a_member_who_owes_a_fine_does_not_name_the_payment(tasks):
    hidden = [task for task in tasks if task.meta["prerequisites"]]
    assert len(hidden) >= 4
    for task in hidden:
        unnamed = task.meta["prerequisites"]
        assert set(unnamed) == {"pay"} and "lend" in task.meta["template"]
        lent = [call.arguments["member"] for call in calls_of(task) if call.name == "lend"]
        assert any(call_text("pay", {"member": member}) in task.reference for member in lent)
        paid = [call for call in calls_of(task) if call.name == "pay"]
        assert task.query.lower().count("pay the fine") == len(paid) - len(unnamed)


def test_the_verifier_does_not_care_what_the_prerequisite_changed(tasks):
    task = next(t for t in tasks if t.meta["prerequisites"] and t.meta["template"] == "lend")
    assert needs("lend", Lending(), task)

    class Waives(Lending):
        """Lends without a payment, so that the fine stays."""

        def _call(self, tool, arguments):
            fines = self._fines
            self._fines = dict.fromkeys(fines, 0) if tool == "lend" else fines
            result = super()._call(tool, arguments)
            self._fines = fines
            return result

    assert solves(Waives(), task, [action for action in task.reference if '"pay"' not in action])


def test_no_constant_answer_and_no_answer_of_another_task_solves_one(questioning, tasks):
    pool = questioning.pool
    world = probed(Lending())
    for task in tasks:
        others = [t for t in tasks if t is not task and t.meta["template"] == task.meta["template"]]
        guesses = [answer_of(other) for other in others if answer_of(other)]
        assert not is_guessable(world, task, [*constants([]), *guesses])
        assert not solves(Lending(), task, ["shelf"]) or answer_of(task) == "shelf"
    assert pool.metrics()["questioning/hidden_rule_rate"] > 0
    card = pool.card()
    assert "lend after pay" in card and "of 0 proposals" not in card
    again = TaskPool(pool.seeds, overlap=1.0, capacity=100)  # as in a run that resumes
    again.load_state(pool.state())
    assert again.card() == card


def test_choices_of_schemas_are_constant_answers():
    properties = {"a": {"enum": ["red", 3]}, "b": {"items": {"enum": ["blue"]}}}
    found = constants([tool_of("f", "", properties, [])])
    assert {"red", "3", "blue", "yes", "none"} <= set(found)


class Mixed(Lending):
    """Two desks, of which the second calls its tools otherwise and finds every title at once."""

    def tasks(self, split):
        two = super().tasks(split)
        return two + [dataclasses.replace(t, id=f"b/{t.id}", meta={"second": True}) for t in two]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        opening = super().reset(task, seed)
        if not task.meta.get("second"):
            return opening
        return dataclasses.replace(opening, tools=opening.tools[:2])


def test_in_a_mixture_of_worlds_each_gives_tasks():
    found = curious(Mixed).explore(seed=0, budget=16)
    second = sum(task.meta["source"].startswith("b/") for task in found)
    assert len(found) == 16 and 4 <= second <= 12


def test_a_choice_that_may_be_left_out_is_left_out_too():
    class Days(Lending):
        def reset(self, task, seed=0):
            days = {"day": {"enum": ["mon", "tue"], "default": None}}
            tools = [
                tool_of("week", "Show a day, or all.", days, []),
                tool_of("pick", "", days, ["day"]),
            ]
            return dataclasses.replace(super().reset(task, seed), tools=tools)

    operations = operations_of(Days(), Days().reset(Lending().tasks("train")[0]))
    assert set(operations) == {"week", "week mon", "week tue", "pick mon", "pick tue"}
    assert operations["week"].render({}) == call_text("week", {})


def test_tools_that_always_fail_do_not_stop_the_exploration():
    broken = [tool_of(f"broken_{n}", "", {}, []) for n in range(150)]

    class Broken(Lending):
        def reset(self, task, seed=0):
            opening = super().reset(task, seed)
            return dataclasses.replace(opening, tools=[*broken, *opening.tools])

    assert len(curious(Broken).explore(seed=0, budget=6)) == 6


def test_poor_words_are_said_once_and_a_language_model_is_offered():
    numbers = {"action": {"type": "integer", "enum": [1, 2]}}
    tool = tool_of("act", "Act.", numbers, ["action"])

    class Numbers(Lending):
        """Acts 1 and 2 move a light, which each answer shows."""

        def reset(self, task, seed=0):
            self.place = 0
            opening = super().reset(task, seed)
            return dataclasses.replace(opening, tools=[tool])

        def _call(self, name, arguments):
            self.place += {1: 1, 2: -1}.get(arguments.get("action"), 0)
            return f"light {self.place}", True

    pool = curious(Numbers).pool
    poor = synthetic_task(pool.seeds[0], "Act 1.", identity=[1], meta={"undescribed": True})
    run = run_of(pool, make_world=Numbers)
    pool.tasks[poor.id] = poor
    pool.grow = lambda *args: [poor]
    invent(run, pool, None, 0)
    _, said = run.progress.once.call_args.args
    assert "'Act 1.'" in said and "config.questioning.words.name=model" in said
    operations = operations_of(Numbers(), Numbers().reset(pool.seeds[0]))
    assert set(operations) == {"act 1", "act 2"}
    goal = Goal([Event("act 1", {})], [0], None)
    assert Phrasing(operations, set()).undescribed(goal)
