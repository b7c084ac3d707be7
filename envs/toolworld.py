"""Worlds that are nothing but tools: a turn calls some of them, and a turn without a call is the
answer."""

from envs.toolcalls import Call, parse, run_calls
from envs.values import Json
from envs.world import (
    Evaluation,
    Observation,
    StepResult,
    Task,
    TaskWorld,
    Tool,
    nothing_done,
    opening,
)

SYSTEM = "You have tools. Use them to do what the user asks, then answer in words, without a call."


def required_calls(task: Task, what: str) -> list[Call]:
    """Return the calls that a verifier requires. Raises ValueError for another kind of verifier;
    `what` names it."""
    calls = task.verifier.get("calls", [])
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and {"name", "arguments"} <= set(call) for call in calls
    ):
        raise ValueError(f"task {task.id}: {what} is {{'calls': [{{'name', 'arguments'}}, ...]}}")
    return [Call(call["name"], call["arguments"]) for call in calls]


class ToolWorld(TaskWorld):
    """A conversation with tools. Subclasses implement `tasks`, `_open` and `_call`.

    `reset` takes any task with a query. A verifier {"calls": [{"name", "arguments"}, ...]} requires
    these calls, in any order, each answered without an error. Without a verifier the score is 0 and
    a judge decides.
    """

    def __init__(self, system: str, max_calls: int):
        """max_calls: calls allowed in one turn."""
        self._system, self._max_calls = system, max_calls

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start an episode. Raises ValueError for another kind of verifier, and what `_open`
        raises."""
        required = required_calls(task, f"a verifier of {self.name}")
        tools = self._open(task, seed)
        self._task, self._required, self._over = task, required, False
        self._succeeded: list[Call] = []
        return Observation(opening(self._system, task.query), tools)

    def step(self, action: str) -> StepResult:
        """Run the turn's calls. `info["calls"]` lists them in order, each with "result" and "ok"
        (False = error)."""
        self._require_episode()
        if self._over:
            return nothing_done()
        messages, info = run_calls(parse(action), self._call, self._max_calls)
        self._succeeded += [Call(c["name"], c["arguments"]) for c in info["calls"] if c["ok"]]
        self._over = not messages
        reward = self.evaluate().score if self._over else 0.0
        return StepResult(messages, reward=reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        self._require_episode()
        unmatched = list(self._succeeded)
        for call in self._required:
            if call in unmatched:
                unmatched.remove(call)
        matched = len(self._succeeded) - len(unmatched)
        success = bool(self._required) and matched == len(self._required)
        return Evaluation(
            float(success), success, {"progress": matched / max(len(self._required), 1)}
        )

    def _open(self, task: Task, seed: int) -> list[Tool]:
        """Bring the tools to the initial state of an episode, and return them."""
        raise NotImplementedError

    def _call(self, name: str, arguments: Json) -> tuple[str, bool]:
        """Return the text of a call's result, and False if it is an error. Never raises."""
        raise NotImplementedError
