"""Labels depend on what a turn changed in a replay, not on how it looks."""

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
from tests.evolver.toy import (
    BLUE,
    BOOKS,
    GREEN,
    LEND,
    LEND_11,
    LEND_15,
    MARK_11,
    RED,
    WON,
    Library,
    NoSnapshots,
    attempt,
    call,
    task,
    tried,
)

BOTH = task("Lend Solaris and mark Dune.", lent=["B15"], mark=["B11"])


def judge_of(make_world=Library, **options):
    return ReplayJudge(Parts(make_world=make_world), **options)


def values(judge, trajectories):
    return [[label.value for label in row] for row in judge.label(trajectories)]


def label(trajectory, make_world):
    return values(judge_of(make_world), [trajectory])[0]


def labels(the_task, *actions, make_world=Library):
    return label(tried(*actions, of=the_task, world=make_world), make_world)


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


ASKED = task("What is the green book?", answer="Solaris")
COUNTED = task("How many red books are there?", answer="2")
RULES = {
    "needed steps of a success are good": (LEND, WON, [GOOD] * 3),
    "a superfluous look-up is bad": (LEND, [RED, *WON], [BAD, GOOD, GOOD, GOOD]),
    "of two equal look-ups the first is good": (LEND, [GREEN, *WON], [GOOD, BAD, GOOD, GOOD]),
    "a refused call is bad": (LEND, [LEND_15, *WON], [BAD, GOOD, GOOD, GOOD]),
    "a refused call of a failure is bad": (LEND, [LEND_15, GREEN], [BAD, ABSTAIN]),
    "harm in a failure is bad and the rest is judged without it":
        (LEND, [GREEN, RED, LEND_11, LEND_15, "done"], [GOOD, BAD, BAD, GOOD, ABSTAIN]),
    "in a failure only what advanced is good":
        (BOTH, [GREEN, LEND_15, BLUE], [GOOD, GOOD, ABSTAIN]),
    "a failure that advanced nothing": (LEND, [GREEN, RED], [ABSTAIN, ABSTAIN]),
    "an end before anything went wrong is bad": (LEND, [GREEN, "done"], [ABSTAIN, BAD]),
    "no turn": (LEND, [], []),
    "doing nothing": (LEND, ["done"], [BAD]),
    "the look-up behind an answer is good": (ASKED, [GREEN, "Solaris"], [GOOD, GOOD]),
    "only one look-up is behind an answer":
        (ASKED, [RED, GREEN, GREEN, "Solaris"], [BAD, GOOD, BAD, GOOD]),
    "a wrong answer is bad": (ASKED, [GREEN, "Dune"], [ABSTAIN, BAD]),
    "an answer that quotes nothing leaves look-ups undecided":
        (COUNTED, [RED, "2"], [ABSTAIN, GOOD]),
    "but not equal ones": (COUNTED, [RED, RED, BLUE, "2"], [ABSTAIN, BAD, ABSTAIN, GOOD]),
}  # fmt: skip


@pytest.mark.parametrize("the_task, actions, expected", RULES.values(), ids=RULES)
def test_a_turn_is_labelled_by_what_it_changed(the_task, actions, expected):
    assert labels(the_task, *actions) == expected


def test_thoughts_that_repeat_what_was_shown_need_nothing():
    acted = ["look", "It says that a lantern burns in Zanzibar. I ignore it.\nopen"]
    found = labels(Task("door/1", "door", "Open."), *acted, make_world=lambda: Door(9))
    assert found == [ABSTAIN, GOOD]


@pytest.mark.parametrize(
    "actions, expected", [([GREEN], [ABSTAIN, BAD]), ([GREEN, LEND_15], [GOOD, GOOD, BAD])]
)
def test_a_turn_cut_by_its_limit_never_reached_the_world_and_is_bad(actions, expected):
    trajectory = tried(*actions)
    trajectory.stop = StopReason.LENGTH
    cut = Completion([], [], "length", 0)
    trajectory.turns.append(Turn([], cut, "Let me think about", []))
    assert label(trajectory, Library) == expected


class Numbered(Library):
    """Ids have one digit, and a book may be lent unseen."""

    def _call(self, tool, value):
        self._state["seen"] = list(BOOKS)
        text = super()._call(tool, f"B1{value}" if value.isdigit() else value)
        return re.sub(r"B1(\d)", r"\1", text).replace("red", "red, 1.5 kg")


@pytest.mark.parametrize(
    "look_ups, expected",
    [([GREEN], [GOOD]), ([GREEN, RED], [GOOD, BAD]), ([RED, GREEN], [BAD, GOOD])],
)
def test_a_look_up_that_showed_an_id_of_one_digit_is_good_but_not_one_that_showed_it_in_a_number(
    look_ups, expected
):
    found = labels(LEND, *look_ups, call("lend", "5"), "done", make_world=Numbered)
    assert found == [*expected, GOOD, GOOD]


some_actions = st.lists(st.sampled_from([GREEN, RED, LEND_15, LEND_11, MARK_11, "x"]), max_size=6)


class TestWorlds:
    @given(some_actions)
    @settings(max_examples=60, deadline=None)
    def test_replay_from_the_start_labels_like_replay_from_snapshots(self, actions):
        assert labels(BOTH, *actions) == labels(BOTH, *actions, make_world=NoSnapshots)

    @given(some_actions)
    @settings(max_examples=60, deadline=None)
    def test_without_its_bad_steps_an_episode_is_worth_no_less(self, actions):
        trajectory = tried(*actions, of=BOTH)
        judged = zip(actions, label(trajectory, Library))
        rest = tried(*(action for action, got in judged if got != BAD), of=BOTH)
        before = trajectory.evaluation.components["progress"]
        assert rest.evaluation.components["progress"] >= before

    ENDED = "the environment ended the episode"

    @pytest.mark.parametrize(
        "world,stop,why,counted",
        [
            (Fickle, "done", "the replay did not reproduce the outcome", "not_reproduced"),
            (Broken, "done", "the replay failed: RuntimeError", "errors"),
            (Library, "env_error", ENDED, "skipped"),
            (Library, "env_timeout", ENDED, "skipped"),
            (Library, "cancelled", ENDED, "skipped"),
        ],
    )
    def test_what_cannot_be_judged_loses_only_its_labels(self, world, stop, why, counted):
        judge = judge_of(world)
        trajectory = tried(GREEN, LEND_15, of=BOTH)
        trajectory.stop = StopReason(stop)
        Fickle.luck = 1
        assert judge.label([trajectory]) == [[Label(ABSTAIN, why)] * 2]
        assert judge.metrics()[f"attributing/{counted}"] == 1

    def test_an_episode_that_forfeits_is_compared_by_what_it_reached(self):
        whole, forfeited = (tried(GREEN, LEND_15, RED) for _ in range(2))
        forfeited.stop = StopReason.MAX_TURNS
        forfeited.forfeit()
        assert not forfeited.evaluation.success and forfeited.outcome == 0
        assert label(forfeited, Library) == label(whole, Library) == [GOOD, GOOD, BAD]

    def test_the_live_world_is_left_alone(self):
        world = Library()
        trajectory = attempt(world, LEND, [GREEN, LEND_15])
        before = world.snapshot()
        label(trajectory, Library)
        assert world.snapshot() == before


class TestReasons:
    def test_each_label_has_a_reason(self):
        actions = [RED, GREEN, call("lend", "B99"), *WON]
        (row,) = judge_of().label([tried(*actions)])
        assert [label.reason for label in row] == [
            "the goal is reached without the turn",
            "the episode is worth less without the turn",
            "the turn produced only errors",
            "another turn showed the same",
            "the episode is worth less without the turn",
            "the turn ended the episode in success",
        ]

    def test_a_judge_of_a_few_lines_has_the_optional_members(self):
        class LastIsGood(TurnJudge):
            def label(self, trajectories):
                abstaining = [[Label(ABSTAIN)] * (len(t.turns) - 1) for t in trajectories]
                return [[*row, Label(GOOD, "last")] for row in abstaining]

        judge = LastIsGood()
        assert judge.label([tried(GREEN, "done")]) == [[(ABSTAIN, ""), (GOOD, "last")]]
        optional = (judge.roles, judge.concurrency, judge.reproduces_outcome, judge.metrics())
        assert optional == ((), 1, False, {})
        judge.close()


class TestCost:
    def test_groups_without_spread_can_be_skipped(self):
        same = [tried(*WON, rollout=g) for g in range(2)]
        mixed = [tried(GREEN, of=BOTH), tried(GREEN, LEND_15, RED, MARK_11, of=BOTH)]
        found = judge_of(skip_flat=True).label(same + mixed)
        assert found[:2] == [[Label(ABSTAIN, "the group's outcomes are equal")] * 3] * 2
        assert [label.value for label in found[3]] == [GOOD] * 4

    def test_rollouts_alike_are_replayed_once(self):
        judge = judge_of()
        one = tried(RED, *WON)
        judge.label([one])
        steps = judge.metrics()["attributing/env_steps"]
        judge.label([one] * 8)
        assert judge.metrics()["attributing/env_steps"] == steps

    def test_without_snapshots_a_turn_costs_one_start(self):
        class Counted(NoSnapshots):
            resets = 0

            def reset(self, task, seed=0):
                Counted.resets += 1
                return super().reset(task, seed)

        judge = judge_of(Counted)
        trajectory = tried(GREEN, RED, LEND_15, "done")
        judge.label([trajectory])
        assert Counted.resets <= 1 + len(trajectory.turns)

    def test_the_bound_leaves_the_first_steps_undecided(self):
        judge = judge_of(max_replayed=40)
        (found,) = judge.label([tried(*[RED] * 30, *WON)])
        figures = judge.metrics()
        assert found[0] == Label(ABSTAIN, "the limit of replayed steps was reached")
        assert [label.value for label in found[-3:]] == [GOOD] * 3
        assert figures["attributing/over_budget"] == 1 and figures["attributing/env_steps"] < 100

    def test_rates_add_up(self):
        judge = judge_of()
        judge.label([tried(RED, GREEN, "done")])
        figures = judge.metrics()
        rates = [figures[f"attributing/{name}_rate"] for name in ("good", "bad", "abstain")]
        assert sum(rates) == pytest.approx(1.0)
        assert judge.metrics()["attributing/trajectories"] == 0


def flights(world, the_task):
    """The flight that a reference books, and another one that its search lists."""
    *_, search = (action for action in the_task.reference if '"flights"' in action)
    rows = attempt(world, the_task, [search]).turns[0].observation[0]["content"].splitlines()
    ids = [row.split()[-1] for row in rows]
    booked = "".join(the_task.reference)
    (right,) = (id for id in ids if f'"{id}"' in booked)
    return right, next(id for id in ids if id != right)


class TestTravel:
    @staticmethod
    def tasks(world, template=""):
        tasks = world.tasks("train")
        return [t for t in tasks if not template or t.meta["template"] == template]

    def test_every_step_of_a_reference_is_good_or_undecided(self):
        world = Travel(n_train=48)
        tasks = self.tasks(world)
        solved = [attempt(world, t, t.reference) for t in tasks]
        for the_task, found in zip(tasks, values(judge_of(Travel), solved), strict=True):
            assert BAD not in found and found[-1] == GOOD, the_task.query
            assert the_task.verifier["answer"] is not None or ABSTAIN not in found, the_task.query

    def test_an_inserted_repeat_is_the_bad_one(self):
        world = Travel(n_train=48)
        for the_task in self.tasks(world):
            if len(the_task.reference) > 2:
                trajectory = attempt(world, the_task, [the_task.reference[0], *the_task.reference])
                assert trajectory.evaluation.success
                found = label(trajectory, Travel)
                assert found[1] == BAD and found.count(BAD) == 1, the_task.query

    def test_a_booking_of_another_flight_is_bad(self):
        world = Travel(n_train=48)
        the_task, *_ = self.tasks(world, "book")
        right, wrong = flights(world, the_task)
        *before, book, _ = the_task.reference
        quote = call_text("quote", {"flight": wrong})
        actions = [*before, quote, book.replace(right, wrong), "done"]
        found = label(attempt(world, the_task, actions), Travel)
        assert found[-2] == BAD and GOOD not in found

    def test_what_is_done_to_an_order_counts_though_its_id_came_after_a_wrong_one(self):
        """Without the wrong booking the right one gets the id that the wrong one had."""
        world = Travel(n_train=60)
        the_task, *_ = self.tasks(world, "book.bag")
        right, wrong = flights(world, the_task)
        *before, book, _, _ = the_task.reference
        quote = call_text("quote", {"flight": wrong})
        start = [*before, quote, book.replace(right, wrong), book]
        answer = attempt(world, the_task, start).turns[-1].observation[0]["content"]
        bag = call_text("bag", {"order": answer.split()[-1]})
        found = label(attempt(world, the_task, [*start, bag, "done"]), Travel)
        assert found == [GOOD] * len(before) + [BAD, BAD, GOOD, GOOD, ABSTAIN]

    def test_labels_do_not_depend_on_company(self):
        world = Travel(n_train=12)
        tries = []
        for t in self.tasks(world):
            tries += [
                attempt(world, t, [*t.reference[:n], "done"]) for n in range(len(t.reference))
            ]
        alone = [judge_of(Travel).label([trajectory])[0] for trajectory in tries]
        assert judge_of(Travel).label(tries) == alone
