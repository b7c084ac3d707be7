"""Self-questioning by language models: one explores, one writes tasks, and execution decides which are kept.

As in section 3 of the AgentEvolver paper, a walk has a breadth-first phase of N_b steps and a depth-first phase in
which only the last N_d observations are shown. The writer turns the record of a walk into tasks of a preferred
difficulty.

A reference consists of steps of the walk, named by their numbers: what is executed is what was done, never text that
the writer made up. If the world can check a result itself (`verifier_kind`), the executed reference becomes the
verifier; otherwise an outcome judge has to score the attempts (evolver/questioning/judges.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from envs.profile import draft, tools_of
from envs.world import Message, Observation, Task, World, WorldError
from evolver.llm.client import Chat, ChatError, Question
from evolver.llm.embedders import HashedNgrams
from evolver.llm.prompts import prompt
from evolver.llm.schemas import INTEGER, NUMBER, TEXT, array, record
from evolver.questioning.pool import TaskPool
from evolver.questioning.tasks import CLOSING, Unfit, probe_of, synthetic_task, verifier_kind
from evolver.traces import rules_of, shortened, text_of, transcript, words
from rl.bounds import Count, CountOrZero
from rl.seeds import seed_of

MASK = "Look around and find out what can be done here."  # replaces the query of the seed task
_TASK = record(query=TEXT, confidence=NUMBER, steps=array(INTEGER), answer=TEXT)
SCHEMA = record(tasks=array(_TASK))
_LEVELS = ("easy: one thing to look up or change", "medium: a few steps that depend on each other")
_LEVELS += ("hard: several steps that depend on each other, and something that has to be found out first",)
_CALL = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'


@dataclass
class LlmWalk:
    """(action, observation) of each step of a walk that starts in the world of `start`."""

    start: Task
    opening: Observation
    steps: list[tuple[str, str]] = field(default_factory=list)


class LlmExplorer:
    """Explores the worlds of the seed tasks, whose queries are masked, with the roles `explorer` and `writer`."""

    roles = ("explorer", "writer")

    def __init__(
        self,
        make_world: Callable[[], World],
        chat: Chat,
        shown: int,
        pool: TaskPool,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        breadth: CountOrZero = 3,
        depth: CountOrZero = 17,
        per_walk: Count = 3,
        rounds: Count = 8,
        parallel: Count = 8,
    ):
        """shown: characters of an observation that a model sees. progress: called with (tasks kept, budget). breadth,
        depth: steps of the two phases. per_walk: most tasks of one walk. rounds: most walks from one seed task for one
        `explore`. parallel: walks at a time."""
        self._make_world, self.chat, self.shown, self.pool, self.progress = make_world, chat, shown, pool, progress
        self.breadth, self.depth, self.per_walk = breadth, depth, per_walk
        self.rounds, self.parallel = rounds, parallel
        self._embedder = HashedNgrams()  # finds the tasks that the writer is asked not to repeat
        world = make_world()
        # If the world does not describe itself, draft a profile from the tools of a few tasks.
        profile = world.profile() or draft(world.name, tools_of(world, pool.seeds[:8]))
        self.checked = verifier_kind(world)
        world.close()
        self.profile, self.preference = profile_text(profile), preference_text(profile)

    def explore(self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random) -> Iterator[Task]:
        """Yield new tasks, the walks of several worlds at a time. Raises RunEnds."""
        size = len(self.pool.tasks)
        for _ in range(self.rounds):
            seed = rng.getrandbits(63)
            starts = rng.sample(seeds, len(seeds))
            for first in range(0, len(starts), self.parallel):
                for walk, proposals in self._proposals(starts[first : first + self.parallel], seed):
                    yield from self._tasks(world, walk, proposals)
                self.progress(len(self.pool.tasks) - size, budget)

    def _proposals(self, starts: Sequence[Task], seed: int) -> list[tuple[LlmWalk, list[dict[str, Any]]]]:
        """Walk from each start and return the walks with the writer's proposals, the most confident first."""
        with ThreadPoolExecutor(len(starts)) as threads:
            walks = list(threads.map(lambda start: self._walk(start, seed_of(seed, start.id)), starts))
        self.pool.count(walks=len(walks), steps=sum(len(walk.steps) for walk in walks))
        walks = [walk for walk in walks if walk.steps]
        answers = self.chat.ask([self._writing(walk, seed_of(seed, walk.start.id)) for walk in walks])
        proposals = []
        for walk, answer in zip(walks, answers):
            if isinstance(answer, ChatError):
                self.pool.reject("nothing written", tried=0)
            else:
                ranked = sorted(answer.parsed["tasks"], key=lambda proposal: -proposal["confidence"])
                proposals.append((walk, ranked[: self.per_walk]))
        return proposals

    # --- exploring ----------------------------------------------------------------------------------------------------

    def _walk(self, start: Task, seed: int) -> LlmWalk:
        """Make one walk. It ends early if the chat model does not answer or the world breaks."""
        world, walk = self._make_world(), LlmWalk(start, Observation([]))
        try:
            walk.opening = world.reset(self._probe(start), start.seed)
            for k in range(self.breadth + self.depth):
                (reply,) = self.chat.ask([self._exploring(walk, k, seed_of(seed, "turn", k))])
                if isinstance(reply, ChatError) or not reply.text.strip():
                    break
                result = world.step(reply.text)
                walk.steps.append((reply.text, text_of(result.messages)))
                if result.terminated or result.truncated:
                    break
        except WorldError:
            self.pool.reject("the world broke", tried=0)
        finally:
            world.close()
        return walk

    def _probe(self, start: Task) -> Task:
        """Return a task in the world of `start` with nothing to do."""
        blank = {"state": {"state": [], "answer": None}, "calls": {"calls": []}, "": {}}[self.checked]
        return replace(probe_of(start), query=MASK, origin="synthetic", verifier=blank, meta=start.meta | _entry(start))

    def _exploring(self, walk: LlmWalk, k: int, seed: int) -> Question:
        """Return the question for step k of a walk."""
        text = prompt("explore")
        tools = json.dumps(walk.opening.tools, ensure_ascii=False)
        steps, phase = self.breadth + self.depth, f"Phase 1, step {k + 1} of {self.breadth}: look at what there is."
        if k >= self.breadth:
            phase = f"Phase 2, step {k + 1} of {steps}: go deeper into one thing; build upon what you saw last."
        window = walk.steps if k < self.breadth else walk.steps[-self.depth :]
        messages: list[Message] = text.messages(
            profile=self.profile,
            rules=rules_of(walk.opening.messages, 4 * self.shown),
            tools=f"Its tools: {tools}\nA call is written as\n{_CALL}\n" if walk.opening.tools else "",
            opening=text_of([m for m in walk.opening.messages if m.get("role") != "system"]),
            phase="" if window else phase,
        )
        for action, observation in window:
            messages.append({"role": "assistant", "content": action})
            messages.append({"role": "user", "content": shortened(observation, self.shown)})
        if window:
            messages[-1]["content"] += f"\n\n{phase}"
        return Question("explorer", messages, None, text.version, seed)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _writing(self, walk: LlmWalk, seed: int) -> Question:
        text = prompt("write_tasks")
        known = "\n".join(f"- {query}" for query in self._nearest(walk)) or "(none yet)"
        messages = text.messages(
            profile=self.profile, preference=self.preference, most=str(self.per_walk), known=known,
            count=str(len(walk.steps)), steps=transcript(walk.steps, self.shown),
        )  # fmt: skip
        return Question("writer", messages, SCHEMA, text.version, seed)

    def _nearest(self, walk: LlmWalk, count: int = 12) -> list[str]:
        """Return the queries that this walk is likely to lead to again: of the same world, then near its actions."""
        here = [task.query for task in self.pool.tasks.values() if task.meta.get("source") == walk.start.id]
        others = [task.query for task in self.pool.tasks.values() if task.query not in here]
        if others and len(here) < count:
            vectors_ND = self._embedder([" ".join(action for action, _ in walk.steps), *others])
            ranked = (vectors_ND[1:] @ vectors_ND[0]).argsort(kind="stable")[::-1]
            here += [others[i] for i in ranked[: count - len(here)]]
        return here[-count:]

    # --- making tasks -------------------------------------------------------------------------------------------------

    def _tasks(self, world: World, walk: LlmWalk, proposals: Sequence[dict[str, Any]]) -> Iterator[Task]:
        for proposal in proposals:
            try:
                task = self._task(world, walk, proposal)
            except Unfit as reason:
                self.pool.reject(str(reason))
            except WorldError:
                self.pool.reject("the world broke")
            else:
                yield task

    def _task(self, world: World, walk: LlmWalk, proposal: dict[str, Any]) -> Task:
        """Return the task of a proposal, its reference executed. Raises Unfit, with the reason, if there is none."""
        query, answer, start = proposal["query"].strip(), proposal["answer"].strip(), walk.start
        numbers = list(dict.fromkeys(proposal["steps"]))
        if not query or not numbers or not all(1 <= n <= len(walk.steps) for n in numbers):
            raise Unfit("no such steps" if query else "no query")
        if answer and words(answer) in words(query):
            raise Unfit("answer in the query")
        actions = [walk.steps[n - 1][0] for n in numbers]
        return synthetic_task(
            start,
            query,
            identity=[start.id, query, actions],
            verifier=self._execute(world, self._probe(start), actions, answer),
            reference=[*actions, *([answer or CLOSING] if self.checked else [])],
            difficulty=len(actions),
            meta=_entry(start) | {"source": start.id, "template": "llm"},
        )

    def _execute(self, world: World, probe: Task, actions: Sequence[str], answer: str) -> dict[str, Any]:
        """Play the reference from the start and return the verifier. Raises Unfit if a step fails."""
        world.reset(probe, probe.seed)
        calls: list[dict[str, Any]] = []
        for k, action in enumerate(actions):
            result = world.step(action)
            if result.info.get("errors") or result.info.get("parse_error"):
                raise Unfit("reference fails")
            if (result.terminated or result.truncated) and k < len(actions) - 1:
                raise Unfit("reference ends too early")
            calls += [{"name": c["name"], "arguments": c["arguments"]} for c in result.info.get("calls", ())]
        if self.checked == "calls":
            return {"calls": calls}
        if self.checked != "state":
            return {}
        state = world.difference()
        if not state and not answer:
            raise Unfit("nothing to check")
        return {"state": state, "answer": answer or None}


def _entry(start: Task) -> dict[str, Any]:
    """Return the field of `meta` that leads an adapter to the world of `start`."""
    return {"entry": start.meta.get("entry", start.id)}


def profile_text(profile: dict[str, Any], limit: int = 8000) -> str:
    """Return a world's profile in lines: entities with their attributes, operations."""
    lines = []
    for entity in profile.get("entities", ()):
        attributes = ", ".join(entity.get("attributes", ()))
        lines.append(f"- {entity['name']}" + (f" ({attributes})" if attributes else ""))
        lines += [f"    {_operation(operation)}" for operation in entity.get("operations", ())]
    lines += [f"- {_operation(operation)}" for operation in profile.get("operations", ())]
    return shortened("\n".join(dict.fromkeys(lines)), limit) or "(nothing is known)"


def _operation(operation: dict[str, Any]) -> str:
    description = str(operation.get("description", "")).split("\n")[0]
    return f"{operation['name']}: {shortened(description, 160)}" if description else str(operation["name"])


def preference_text(profile: dict[str, Any]) -> str:
    """Return which tasks are preferred. The default is the paper's: 2 entities, 3 attributes, 3 operations, hard."""
    wanted = profile.get("task_preference", {})
    entities, operations = wanted.get("num_entities", 2), wanted.get("num_operations", 3)
    level = _LEVELS[min(max(wanted.get("relation_difficulty", 3), 1), 3) - 1]
    return (
        f"It is about up to {entities} entities and {wanted.get('num_attributes', 3)} attributes, takes up to"
        f" {operations} different operations, and is {level}."
    )
