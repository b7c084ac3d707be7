"""Solutions in the order in which they are tried: look-ups, then goal after goal, and a refusal
before its remedy."""

import pytest

from envs.toolcalls import call_text, parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World
from evolver.questioning.tried import as_tried

KEYS = {"gold": "K71", "silver": "K52"}


class Vault(World):
    """Boxes that open with a key and say, one after the other, which of two locks keeps them shut.
    An open box cannot be locked out again."""

    name = "vault"

    def tasks(self, split):
        return []

    def reset(self, task, seed=0):
        self._done = []
        self._task = task
        self._patience = 20
        return Observation([{"role": "user", "content": task.query}], [])

    def step(self, action):
        self._patience -= 1
        messages, info = run_calls(parse(action), self._call, most=1)
        return StepResult(messages, terminated=not messages or not self._patience, info=info)

    def _call(self, tool, arguments):
        box = arguments.get("box")
        key = arguments.get("key")
        if tool == "find_key":
            return f"the {box} box has the key {KEYS[box]}", True
        if tool == "open" and key not in KEYS.values():
            return "error: no such key", False
        if tool == "open" and f"unlock {key}" not in self._done:
            return "error: the bolt is drawn", False
        if tool == "open" and f"disarm {key}" not in self._done:
            return "error: the alarm is on", False
        self._done.append(f"{tool} {key or box}")
        return "done", True

    def evaluate(self):
        done = all(goal in self._done for goal in self._task.verifier["goals"])
        return Evaluation(float(done), done)


def calls(text):
    """Return the turns of calls that are written as "unlock K52, open K52"."""
    pairs = [call.split() for call in text.split(", ")]
    keys = {"find_key": "box"}
    return [call_text(name, {keys.get(name, "key"): value}) for name, value in pairs]


def task(solution, *, query, goals, prerequisites=("unlock", "disarm")):
    meta = {"prerequisites": list(prerequisites)}
    reference = [*solution, "done"]
    return Task("t", "vault", query, reference=reference, verifier={"goals": goals}, meta=meta)


def test_look_ups_come_first_and_a_refusal_before_its_own_remedy():
    scrambled = (
        "find_key gold, unlock K71, find_key silver, disarm K52, unlock K52, disarm K71,"
        " open K71, open K52"
    )
    tried = (
        "find_key gold, find_key silver,"
        " open K71, unlock K71, open K71, disarm K71, open K71,"
        " open K52, unlock K52, open K52, disarm K52, open K52"
    )
    query = "Open the gold box. Then open the silver box."
    given = task(calls(scrambled), query=query, goals=["open K71", "open K52"])
    assert as_tried(Vault(), given) == [*calls(tried), "done"]


OPENING = "unlock K52, disarm K52, open K52"


def test_what_the_query_asks_for_is_done_without_waiting_for_a_refusal():
    query = "Unlock K52, disarm K52 and open it."
    solution = calls(OPENING)
    asked = task(solution, query=query, goals=["open K52"], prerequisites=())
    assert as_tried(Vault(), asked) == asked.reference


@pytest.mark.parametrize(
    "solution",
    [
        ["".join(calls("unlock K52, disarm K52")), *calls("open K52")],  # a turn of two calls
        ["Let me see.", *calls(OPENING)],
        # The other order takes more turns than an episode has.
        calls(f"{'unlock K52, disarm K52, ' * 9}open K52"),
    ],
)
def test_a_solution_that_cannot_be_tried_in_another_order_stays(solution):
    given = task(solution, query="Open the box of K52.", goals=["open K52"])
    assert as_tried(Vault(), given) == given.reference


def test_one_goal_without_detours_and_a_solution_of_another_source_stay():
    look_up = calls("find_key gold")
    given = task(look_up, query="Find the gold key.", goals=[], prerequisites=())
    assert as_tried(Vault(), given) == given.reference
    walked = task(calls("unlock K52, open K52"), query="Win.", goals=["unlock K52"])
    walked.meta = {}
    assert as_tried(Vault(), walked) == walked.reference
