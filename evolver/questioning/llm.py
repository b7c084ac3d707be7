"""Self-questioning by language models: one explores, one writes tasks, execution decides which are kept.

As in section 3 of the AgentEvolver paper: a walk has a breadth-first phase of N_b steps and a depth-first one, in which
only the last N_d observations are seen; the writer turns its record into tasks of a preferred difficulty; tasks that
repeat others in words are dropped, and so are those whose reference solution fails when it is executed.

A reference consists of steps of the walk, named by their numbers: what is executed is what was done, never a text that
the writer made up. Where the world can check a result itself (`how_checked`), the executed reference becomes the
verifier; elsewhere an outcome judge has to score the attempts (evolver/questioning/judge.py).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from envs.profile import draft, tools_of
from envs.world import Message, Observation, Task, World, WorldError
from evolver.llm import Chat, ChatError, Question
from evolver.navigating.embed import Embedder, HashedNgrams
from evolver.prompts import prompt
from evolver.questioning.filter import unfeasible
from evolver.questioning.pool import TaskPool
from evolver.questioning.write import CLOSING, Unfit
from evolver.traces import rules_of, shortened, text_of, transcript, words
from rl.seeds import seed_of

MASK = "Look around and find out what can be done here."  # in the place of the seed task's query
SCHEMA = {
    "type": "object",
    "properties": {
        "tasks": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "confidence": {"type": "number"},
                    "steps": {"type": "array", "items": {"type": "integer"}},
                    "answer": {"type": "string"},
                },
                "required": ["query", "confidence", "steps", "answer"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["tasks"],
    "additionalProperties": False,
}
_LEVELS = ("easy: one thing to look up or change", "medium: a few steps that depend on each other")
_LEVELS += ("hard: several steps that depend on each other, and something that has to be found out first",)


@dataclass
class LlmWalk:
    """(action, observation) of each step of one walk from the start of `start`'s world."""

    start: Task
    opening: Observation
    turns: list[tuple[str, str]] = field(default_factory=list)


def how_checked(world: World) -> str:
    """How a world checks a synthetic task: "state" (by its `difference()`), "calls" (as its profile says), "" = not."""
    if hasattr(world, "difference"):
        return "state"
    return "calls" if world.profile().get("verifier") == "calls" else ""


class LlmQuestioning(TaskPool):
    """Explores the worlds of the seed tasks, whose queries are masked, with the roles `explorer` and `writer`."""

    def __init__(
        self,
        chat: Chat,
        make_world: Callable[[], World],
        seed_tasks: Sequence[Task],
        *,
        breadth: int = 3,
        depth: int = 17,
        per_walk: int = 3,
        rounds: int = 8,
        overlap: float = 0.8,
        capacity: int = 512,
        shown: int = 2000,
        parallel: int = 8,
        embedder: Embedder | None = None,
    ):
        """`breadth`, `depth`: steps of the phases; `per_walk`: most tasks of one walk; `rounds`: most walks of a world
        for one `explore`; `shown`: characters of an observation that is shown; `parallel`: walks at a time;
        `embedder` finds the tasks that a writer is told not to repeat; the others: see TaskPool."""
        super().__init__(seed_tasks, overlap=overlap, capacity=capacity)
        self.chat, self._make_world, self.embedder = chat, make_world, embedder or HashedNgrams()
        self.breadth, self.depth, self.per_walk, self.rounds = breadth, depth, per_walk, rounds
        self.shown, self.parallel = shown, parallel
        self.progress: Callable[[int, int], None] = lambda done, of: None  # told how many tasks there are
        world = make_world()
        # What a world does not say of itself is drafted from the tools of a few tasks.
        profile = world.profile() or draft(world.name, tools_of(world, seed_tasks[:8]))
        self.checked = how_checked(world)
        world.close()
        self.profile, self.preference = profile_text(profile), preference_text(profile)

    def explore(self, seed: int, budget: int) -> list[Task]:
        """At most `budget` new tasks; they join `tasks` as they are found, so what is paid for stays where the run
        ends early. Raises RunEnds."""
        rng, found = random.Random(seed_of(seed, "explore")), []
        for n in range(self.rounds):
            starts = rng.sample(self._seeds, len(self._seeds))
            for first in range(0, len(starts), self.parallel):
                batch = starts[first : first + self.parallel]
                if len(found) >= budget:
                    self._shrink()
                    return found
                found += self._explore(batch, seed_of(seed, "walk", n), budget - len(found))
                self.progress(len(found), budget)
        self._shrink()
        return found

    def _explore(self, starts: Sequence[Task], seed: int, budget: int) -> list[Task]:
        with ThreadPoolExecutor(len(starts)) as threads:
            walks = list(threads.map(lambda start: self._walk(start, seed_of(seed, start.id)), starts))
        self._counts.update(walks=len(walks), steps=sum(len(walk.turns) for walk in walks))
        walks = [walk for walk in walks if walk.turns]
        answers = self.chat.ask([self._writing(walk, seed_of(seed, walk.start.id)) for walk in walks])
        world, found = self._make_world(), []
        try:
            for walk, answer in zip(walks, answers):
                if isinstance(answer, ChatError):
                    self._counts["- nothing written"] += 1
                    continue
                for proposal in sorted(answer.parsed["tasks"], key=lambda p: -p["confidence"])[: self.per_walk]:
                    if len(found) < budget and (task := self._accepted(world, walk, proposal)):
                        self._known.add(task)
                        self._keep(task)
                        found.append(task)
        finally:
            world.close()
        return found

    # --- exploring ----------------------------------------------------------------------------------------------------

    def _walk(self, start: Task, seed: int) -> LlmWalk:
        """One walk. A chat model that does not answer, or a world that breaks, ends it where it is."""
        world, walk = self._make_world(), LlmWalk(start, Observation([]))
        try:
            walk.opening = world.reset(self._probe(start), start.seed)
            for k in range(self.breadth + self.depth):
                (reply,) = self.chat.ask([self._exploring(walk, k, seed_of(seed, "turn", k))])
                if isinstance(reply, ChatError) or not reply.text.strip():
                    break
                result = world.step(reply.text)
                walk.turns.append((reply.text, text_of(result.messages)))
                if result.terminated or result.truncated:
                    break
        except WorldError:
            self._counts["- the world broke"] += 1
        finally:
            world.close()
        return walk

    def _probe(self, start: Task) -> Task:
        """An episode in the world of `start` with nothing to do."""
        blank = {"state": {"state": [], "answer": None}, "calls": {"calls": []}, "": {}}[self.checked]
        meta = {**start.meta, "entry": start.meta.get("entry", start.id)}
        return Task(
            f"probe/{start.id}", start.env, MASK, start.split, "synthetic", start.seed, verifier=blank, meta=meta
        )

    def _exploring(self, walk: LlmWalk, k: int, seed: int) -> Question:
        text = prompt("explore")
        tools = json.dumps(walk.opening.tools, ensure_ascii=False)
        calls = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
        steps, phase = self.breadth + self.depth, f"Phase 1, step {k + 1} of {self.breadth}: look at what there is."
        if k >= self.breadth:
            phase = f"Phase 2, step {k + 1} of {steps}: go deeper into one thing; build upon what you saw last."
        window = walk.turns if k < self.breadth else walk.turns[-self.depth :]
        messages: list[Message] = text.messages(
            profile=self.profile,
            rules=rules_of(walk.opening.messages, 4 * self.shown),
            tools=f"Its tools: {tools}\nA call is written as\n{calls}\n" if walk.opening.tools else "",
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
            count=str(len(walk.turns)), steps=transcript(walk.turns, self.shown),
        )  # fmt: skip
        return Question("writer", messages, SCHEMA, text.version, seed)

    def _nearest(self, walk: LlmWalk, count: int = 12) -> list[str]:
        """The queries that this walk is most likely to lead to again: of the same world, and near its actions."""
        here = [task.query for task in self.tasks.values() if task.meta.get("source") == walk.start.id]
        others = [task.query for task in self.tasks.values() if task.query not in here]
        if others and len(here) < count:
            vectors_ND = self.embedder([" ".join(action for action, _ in walk.turns), *others])
            ranked = (vectors_ND[1:] @ vectors_ND[0]).argsort(kind="stable")[::-1]
            here += [others[i] for i in ranked[: count - len(here)]]
        return here[-count:]

    # --- keeping ------------------------------------------------------------------------------------------------------

    def _accepted(self, world: World, walk: LlmWalk, proposal: dict[str, Any]) -> Task | None:
        self._counts["tried"] += 1
        try:
            task = self._task(world, walk, proposal)
            why = self._known.repeats(task) or (unfeasible(world, task) if task.verifier else "")
        except Unfit as unfit:
            why = str(unfit)
        except WorldError:
            why = "the world broke"
        self._counts[f"- {why}" if why else "accepted"] += 1
        return None if why else task

    def _task(self, world: World, walk: LlmWalk, proposal: dict[str, Any]) -> Task:
        """The task of a proposal, its reference executed. Raises Unfit with the reason where there is none."""
        query, answer, start = proposal["query"].strip(), proposal["answer"].strip(), walk.start
        numbers = list(dict.fromkeys(proposal["steps"]))
        if not query or not numbers or not all(1 <= n <= len(walk.turns) for n in numbers):
            raise Unfit("no such steps" if query else "no query")
        if answer and words(answer) in words(query):
            raise Unfit("answer in the query")
        actions = [walk.turns[n - 1][0] for n in numbers]
        verifier = self._execute(world, self._probe(start), actions, answer)
        digest = hashlib.blake2b(json.dumps([start.id, query, actions]).encode(), digest_size=8).hexdigest()
        return Task(
            f"syn/{digest}", start.env, query, start.split, "synthetic", start.seed,
            reference=[*actions, *([answer or CLOSING] if self.checked else [])],
            verifier=verifier,
            difficulty=len(actions),
            meta={"entry": start.meta.get("entry", start.id), "source": start.id, "template": "llm"},
        )  # fmt: skip

    def _execute(self, world: World, probe: Task, actions: Sequence[str], answer: str) -> dict[str, Any]:
        """Play the reference from the start; its verifier. Raises Unfit where a step of it fails."""
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


def profile_text(profile: dict[str, Any], limit: int = 8000) -> str:
    """A world's profile in lines: entities with their attributes, operations."""
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
    """What tasks are wanted. Without a preference of the world: the paper's, 2 entities, 3 attributes, 3 operations,
    hard."""
    wanted = profile.get("task_preference", {})
    entities, operations = wanted.get("num_entities", 2), wanted.get("num_operations", 3)
    level = _LEVELS[min(max(wanted.get("relation_difficulty", 3), 1), 3) - 1]
    return (
        f"It is about up to {entities} entities and {wanted.get('num_attributes', 3)} attributes, takes up to"
        f" {operations} different operations, and is {level}."
    )
