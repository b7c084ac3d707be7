"""Worlds that are nothing but tools: a turn calls some of them, and a turn without a call is the
answer."""

from envs.toolcalls import parse, run_calls
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
        calls = task.verifier.get("calls", [])
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and {"name", "arguments"} <= set(call) for call in calls
        ):
            raise ValueError(
                f"task {task.id}: a verifier of {self.name} is"
                " {'calls': [{'name', 'arguments'}, ...]}"
            )
        tools = self._open(task, seed)
        self._task, self._required, self._over = task, calls, False
        self._succeeded: list[Json] = []
        return Observation(opening(self._system, task.query), tools)

    def step(self, action: str) -> StepResult:
        """Run the turn's calls. `info["calls"]` lists them in order, each with "result" and "ok"
        (False = error)."""
        self._require_episode()
        if self._over:
            return nothing_done()
        messages, info = run_calls(parse(action), self._call, self._max_calls)
        done = [call for call in info["calls"] if call["ok"]]
        self._succeeded += [{"name": call["name"], "arguments": call["arguments"]} for call in done]
        self._over = not messages
        reward = self.evaluate().score if self._over else 0.0
        return StepResult(messages, reward=reward, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        self._require_episode()
        unmatched = list(self._succeeded)
        for required in self._required:
            call = {"name": required["name"], "arguments": required["arguments"]}
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
