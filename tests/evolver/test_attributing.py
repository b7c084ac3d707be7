"""Labels depend on what a turn changed in a replay, not on how it looks."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.act import ActionWorld
from envs.toolcalls import call_text
from envs.travel import Travel
from envs.world import Evaluation, Observation, Task
from evolver.attributing import ABSTAIN, BAD, GOOD, Label, TurnJudge
from evolver.attributing.replay import ReplayJudge
from evolver.parts import Parts
from rl.trajectory import Completion, StopReason, Turn
from tests.evolver.toy import BOOKS, Library, attempt, call, task

LEND = task("Lend Solaris.", lent=["B15"])
BOTH = task("Lend Solaris and mark Dune.", lent=["B15"], mark=["B11"])
GREEN, RED, BLUE = call("shelf", "green"), call("shelf", "red"), call("shelf", "blue")


def values(judge, trajectories):
    return [[label.value for label in row] for row in judge.label(trajectories)]


def label(trajectory, make_world):
    return values(ReplayJudge(Parts(make_world=make_world)), [trajectory])[0]


def labels(the_task, *actions, make_world=Library):
    return label(attempt(make_world(), the_task, list(actions)), make_world)


class NoSnapshots(Library):
    snapshots = False


class Fickle(Library):
    """Every other evaluation is different."""

    def evaluate(self):
        Fickle.luck += 1
        result = super().evaluate()
        result.components["progress"] *= 1.0 if Fickle.luck % 2 else 0.5
        return result


class Broken(Library):
    def step(self, action):
        raise RuntimeError("the disk is gone")


class Door(ActionWorld):
    """Open the door; looking tells a story."""

    name = "door"

    def reset(self, task, seed=0):
        self._begin(task)
        return Observation([{"role": "user", "content": task.query}])

    def _act(self, text):
        return text, "A lantern burns in Zanzibar." if text == "look" else "ok", 0.0, text == "open"

    def evaluate(self):
        return Evaluation(float(self._over), self._over)


class TestRule:
    def test_needed_steps_of_a_success_are_good(self):
        assert labels(LEND, GREEN, call("lend", "B15"), "done") == [GOOD, GOOD, GOOD]

    def test_a_superfluous_look_up_is_bad(self):
        assert labels(LEND, RED, GREEN, call("lend", "B15"), "done") == [BAD, GOOD, GOOD, GOOD]

    def test_of_two_equal_look_ups_the_first_is_good(self):
        assert labels(LEND, GREEN, GREEN, call("lend", "B15"), "done") == [GOOD, BAD, GOOD, GOOD]

    def test_thoughts_that_repeat_what_was_shown_need_nothing(self):
        acted = ["look", "It says that a lantern burns in Zanzibar. I ignore it.\nopen"]
        assert labels(Task("door/1", "door", "Open."), *acted, make_world=lambda: Door(9)) == [
            ABSTAIN,
            GOOD,
        ]

    def test_a_refused_call_is_bad(self):
        assert labels(LEND, call("lend", "B15"), GREEN, call("lend", "B15"), "done") == [
            BAD,
            GOOD,
            GOOD,
            GOOD,
        ]
        assert labels(LEND, call("lend", "B15"), GREEN)[0] == BAD

    def test_harm_in_a_failure_is_bad_and_the_rest_is_judged_without_it(self):
        found = labels(LEND, GREEN, RED, call("lend", "B11"), call("lend", "B15"), "done")
        assert found == [GOOD, BAD, BAD, GOOD, ABSTAIN]

    def test_in_a_failure_good_is_only_what_advanced(self):
        assert labels(BOTH, GREEN, call("lend", "B15"), BLUE) == [GOOD, GOOD, ABSTAIN]
        assert labels(LEND, GREEN, RED) == [ABSTAIN, ABSTAIN]

    def test_an_end_before_anything_went_wrong_is_bad(self):
        assert labels(LEND, GREEN, "done") == [ABSTAIN, BAD]

    def test_doing_nothing(self):
        assert labels(LEND) == []
        assert labels(LEND, "done") == [BAD]

    def test_the_look_up_behind_an_answer_is_good(self):
        asked = task("What is the green book?", answer="Solaris")
        assert labels(asked, GREEN, "Solaris") == [GOOD, GOOD]
        assert labels(asked, RED, GREEN, GREEN, "Solaris") == [BAD, GOOD, BAD, GOOD]
        assert labels(asked, GREEN, "Dune") == [ABSTAIN, BAD]

    def test_a_turn_cut_by_its_limit_never_reached_the_world_and_is_bad(self):
        for actions, expected in (
            ([GREEN], [ABSTAIN, BAD]),
            ([GREEN, call("lend", "B15")], [GOOD, GOOD, BAD]),
        ):
            trajectory = attempt(Library(), LEND, actions)
            trajectory.stop = StopReason.LENGTH
            trajectory.turns.append(
                Turn([], Completion([], [], "length", 0), "Let me think about", [])
            )
            assert label(trajectory, Library) == expected

    def test_an_answer_that_quotes_nothing_leaves_look_ups_undecided(self):
        asked = task("How many red books are there?", answer="2")
        assert labels(asked, RED, "2") == [ABSTAIN, GOOD]
        assert labels(asked, RED, RED, BLUE, "2") == [ABSTAIN, BAD, ABSTAIN, GOOD]


class Numbered(Library):
    """Ids have one digit, and a book may be lent unseen."""

    def _call(self, tool, value):
        self._state["seen"] = list(BOOKS)
        text = super()._call(tool, f"B1{value}" if value.isdigit() else value)
        return re.sub(r"B1(\d)", r"\1", text).replace("red", "red, 1.5 kg")


class TestIds:
    def test_a_look_up_that_showed_an_id_of_one_digit_is_good(self):
        assert labels(LEND, GREEN, call("lend", "5"), "done", make_world=Numbered) == [
            GOOD,
            GOOD,
            GOOD,
        ]

    def test_a_look_up_that_showed_the_digit_inside_a_number_is_not(self):
        assert labels(LEND, GREEN, RED, call("lend", "5"), "done", make_world=Numbered) == [
            GOOD,
            BAD,
            GOOD,
            GOOD,
        ]
        assert labels(LEND, RED, GREEN, call("lend", "5"), "done", make_world=Numbered) == [
            BAD,
            GOOD,
            GOOD,
            GOOD,
        ]


class TestWorlds:
    ACTIONS = (RED, GREEN, call("lend", "B11"), call("lend", "B15"), "done")

    @given(
        st.lists(
            st.sampled_from(
                [GREEN, RED, call("lend", "B15"), call("lend", "B11"), call("mark", "B11"), "x"]
            ),
            max_size=6,
        )
    )
    @settings(max_examples=60, deadline=None)
    def test_replay_from_the_start_labels_like_replay_from_snapshots(self, actions):
        assert labels(BOTH, *actions) == labels(BOTH, *actions, make_world=NoSnapshots)

    @given(
        st.lists(
            st.sampled_from([GREEN, RED, call("lend", "B15"), call("mark", "B11"), "x"]), max_size=6
        )
    )
    @settings(max_examples=60, deadline=None)
    def test_without_its_bad_steps_an_episode_is_worth_no_less(self, actions):
        trajectory = attempt(Library(), BOTH, actions)
        found = label(trajectory, Library)
        rest = [
            step.action for step, got in zip(trajectory.turns, found, strict=True) if got != BAD
        ]
        assert (
            attempt(Library(), BOTH, rest).evaluation.components["progress"]
            >= trajectory.evaluation.components["progress"]
        )

    def test_a_world_that_comes_out_otherwise_is_abstained_on_and_counted(self):
        judge = ReplayJudge(Parts(make_world=Fickle))
        trajectory = attempt(Fickle(), BOTH, [GREEN, call("lend", "B15")])
        Fickle.luck = 1
        assert values(judge, [trajectory]) == [[ABSTAIN, ABSTAIN]]
        assert judge.metrics()["attributing/not_reproduced"] == 1

    def test_an_episode_that_forfeits_is_compared_by_what_it_reached(self):
        actions = [GREEN, call("lend", "B15"), RED]
        whole, forfeited = (attempt(Library(), LEND, actions) for _ in range(2))
        forfeited.stop = StopReason.MAX_TURNS
        forfeited.forfeit()
        assert not forfeited.evaluation.success and forfeited.outcome == 0
        assert label(forfeited, Library) == label(whole, Library) == [GOOD, GOOD, BAD]

    def test_a_world_that_breaks_costs_only_its_labels(self):
        judge = ReplayJudge(Parts(make_world=Broken))
        assert values(judge, [attempt(Library(), LEND, [GREEN])]) == [[ABSTAIN]]
        assert judge.metrics()["attributing/errors"] == 1

    def test_the_live_world_is_left_alone(self):
        world = Library()
        trajectory = attempt(world, LEND, [GREEN, call("lend", "B15")])
        before = world.snapshot()
        label(trajectory, Library)
        assert world.snapshot() == before

    @pytest.mark.parametrize(
        "stop", [StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT, StopReason.CANCELLED]
    )
    def test_broken_episodes_are_abstained_on(self, stop):
        trajectory = attempt(Library(), LEND, [GREEN, call("lend", "B15"), "done"])
        trajectory.stop = stop
        judge = ReplayJudge(Parts(make_world=Library))
        assert values(judge, [trajectory]) == [[ABSTAIN] * 3]
        assert judge.metrics()["attributing/skipped"] == 1


class TestReasons:
    def test_each_label_has_a_reason(self):
        actions = [RED, GREEN, call("lend", "B99"), GREEN, call("lend", "B15"), "done"]
        judge = ReplayJudge(Parts(make_world=Library))
        (row,) = judge.label([attempt(Library(), LEND, actions)])
        assert [label.reason for label in row] == [
            "the goal is reached without the turn",
            "the episode is worth less without the turn",
            "the turn produced only errors",
            "another turn showed the same",
            "the episode is worth less without the turn",
            "the turn ended the episode in success",
        ]

    def test_abstaining_has_reasons_too(self):
        def reasons(judge, *tries):
            return {label.reason for row in judge.label(tries) for label in row}

        flat = [attempt(Library(), LEND, [GREEN], rollout=n) for n in range(2)]
        assert reasons(ReplayJudge(Parts(make_world=Library), skip_flat=True), *flat) == {
            "the group's outcomes are equal"
        }
        broken = attempt(Library(), LEND, [GREEN])
        broken.stop = StopReason.ENV_ERROR
        assert reasons(ReplayJudge(Parts(make_world=Library)), broken) == {
            "the environment ended the episode"
        }
        changed = attempt(Library(), LEND, [GREEN])
        changed.evaluation.score = 0.5
        assert reasons(ReplayJudge(Parts(make_world=Library)), changed) == {
            "the replay did not reproduce the outcome"
        }
        long = attempt(Library(), LEND, [RED] * 30 + [GREEN, call("lend", "B15"), "done"])
        assert "the limit of replayed steps was reached" in reasons(
            ReplayJudge(Parts(make_world=Library), max_replayed=40), long
        )
        assert reasons(
            ReplayJudge(Parts(make_world=Broken)), attempt(Library(), LEND, [GREEN])
        ) == {"the replay failed: RuntimeError"}

    def test_a_judge_of_a_few_lines_has_the_optional_members(self):
        class LastIsGood(TurnJudge):
            def label(self, trajectories):
                return [
                    [Label(ABSTAIN)] * (len(t.turns) - 1) + [Label(GOOD, "last")]
                    for t in trajectories
                ]

        judge = LastIsGood()
        assert judge.label([attempt(Library(), LEND, [GREEN, "done"])]) == [
            [(ABSTAIN, ""), (GOOD, "last")]
        ]
        assert (judge.roles, judge.concurrency, judge.reproduces_outcome, judge.metrics()) == (
            (),
            1,
            False,
            {},
        )
        judge.close()


class TestCost:
    def test_groups_without_spread_can_be_skipped(self):
        same = [
            attempt(Library(), LEND, [GREEN, call("lend", "B15"), "done"], rollout=g)
            for g in range(2)
        ]
        mixed = [
            attempt(Library(), BOTH, actions)
            for actions in ([GREEN], [GREEN, call("lend", "B15"), RED, call("mark", "B11")])
        ]
        judge = ReplayJudge(Parts(make_world=Library), skip_flat=True)
        found = values(judge, same + mixed)
        assert found[:2] == [[ABSTAIN] * 3] * 2
        assert found[3] == [GOOD] * 4

    def test_rollouts_alike_are_replayed_once(self):
        judge = ReplayJudge(Parts(make_world=Library))
        one = attempt(Library(), LEND, [RED, GREEN, call("lend", "B15"), "done"])
        judge.label([one])
        steps = judge.metrics()["attributing/env_steps"]
        judge.label([one] * 8)
        assert judge.metrics()["attributing/env_steps"] == steps

    def test_the_bound_leaves_the_first_steps_undecided(self):
        actions = [RED] * 30 + [GREEN, call("lend", "B15"), "done"]
        judge = ReplayJudge(Parts(make_world=Library), max_replayed=40)
        found = values(judge, [attempt(Library(), LEND, actions)])[0]
        figures = judge.metrics()
        assert found[-3:] == [GOOD] * 3 and found[0] == ABSTAIN
        assert figures["attributing/over_budget"] == 1 and figures["attributing/env_steps"] < 100

    def test_rates_add_up(self):
        judge = ReplayJudge(Parts(make_world=Library))
        judge.label([attempt(Library(), LEND, [RED, GREEN, "done"])])
        figures = judge.metrics()
        assert sum(
            figures[f"attributing/{name}_rate"] for name in ("good", "bad", "abstain")
        ) == pytest.approx(1.0)
        assert judge.metrics()["attributing/trajectories"] == 0


class TestTravel:
    def test_every_step_of_a_reference_is_good_or_undecided(self):
        world = Travel(n_train=48)
        tasks = world.tasks("train")
        found_of = values(
            ReplayJudge(Parts(make_world=Travel)), [attempt(world, t, t.reference) for t in tasks]
        )
        for the_task, found in zip(tasks, found_of, strict=True):
            assert BAD not in found and found[-1] == GOOD, the_task.query
            assert the_task.verifier["answer"] is not None or ABSTAIN not in found, the_task.query

    def test_an_inserted_repeat_is_the_bad_one(self):
        world = Travel(n_train=48)
        for the_task in world.tasks("train"):
            if len(the_task.reference) > 2:
                trajectory = attempt(world, the_task, [the_task.reference[0], *the_task.reference])
                assert trajectory.evaluation.success
                found = label(trajectory, Travel)
                assert found[1] == BAD and found.count(BAD) == 1, the_task.query

    def test_a_booking_of_another_flight_is_bad(self):
        world = Travel(n_train=48)
        for the_task in world.tasks("train"):
            if the_task.meta["template"] == "book":
                *before, book, _ = the_task.reference
                where = next(action for action in before if '"flights"' in action)
                rows = (
                    attempt(world, the_task, [where])
                    .turns[0]
                    .observation[0]["content"]
                    .splitlines()
                )
                wrong = next(row.split()[-1] for row in rows if row.split()[-1] not in book)
                right = next(row.split()[-1] for row in rows if row.split()[-1] in book)
                actions = [
                    *before,
                    call_text("quote", {"flight": wrong}),
                    book.replace(right, wrong),
                    "done",
                ]
                found = label(attempt(world, the_task, actions), Travel)
                assert found[-2] == BAD and GOOD not in found
                break
        else:
            pytest.fail("no booking among the tasks")

    def test_what_is_done_to_an_order_counts_though_its_id_came_after_a_wrong_one(self):
        """Without the wrong booking the right one gets the id that the wrong one had."""
        world = Travel(n_train=60)
        for the_task in world.tasks("train"):
            if the_task.meta["template"] == "book.bag":
                *before, book, _, _ = the_task.reference
                where = next(action for action in before if '"flights"' in action)
                rows = (
                    attempt(world, the_task, [where])
                    .turns[0]
                    .observation[0]["content"]
                    .splitlines()
                )
                right = next(row.split()[-1] for row in rows if row.split()[-1] in book)
                wrong = next(row.split()[-1] for row in rows if row.split()[-1] != right)
                start = [
                    *before,
                    call_text("quote", {"flight": wrong}),
                    book.replace(right, wrong),
                    book,
                ]
                id = attempt(world, the_task, start).turns[-1].observation[0]["content"].split()[-1]
                found = label(
                    attempt(world, the_task, [*start, call_text("bag", {"order": id}), "done"]),
                    Travel,
                )
                assert found == [GOOD] * len(before) + [BAD, BAD, GOOD, GOOD, ABSTAIN]
                break
        else:
            pytest.fail("no booking with a bag among the tasks")

    def test_labels_do_not_depend_on_company(self):
        world = Travel(n_train=12)
        tries = [
            attempt(world, t, [*t.reference[:n], "done"])
            for t in world.tasks("train")
            for n in range(len(t.reference))
        ]
        together = ReplayJudge(Parts(make_world=Travel)).label(tries)
        alone = list(
            itertools.chain.from_iterable(
                ReplayJudge(Parts(make_world=Travel)).label([trajectory]) for trajectory in tries
            )
        )
        assert together == alone
