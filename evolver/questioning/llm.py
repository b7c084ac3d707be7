"""Self-questioning by language models: one explores, one writes tasks, and execution decides which
are kept.

As in section 3 of the AgentEvolver paper, a walk has a breadth-first phase of N_b steps and a
depth-first phase in which only the last N_d observations are shown. The writer turns the record of
a walk into tasks of a preferred difficulty.

A task consists of a query and steps of the walk, given by their numbers: only actions of the walk
are executed, never text that the writer made up. The walk is repeated call by call to find out what
its calls change. The task gets the fewest calls that make the chosen changes, and a verifier of
what other calls show afterwards, as the tasks of the embedded explorer do
(evolver/questioning/{site,goals}.py). The writer's query and answer are checked against what the
calls showed (evolver/questioning/checks.py).
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from envs.profile import draft, tools_of
from envs.world import Message, Observation, Task, Tool, World, WorldError
from evolver.llm.answers import INTEGER, NUMBER, array, record, string, unfit_reason
from evolver.llm.embedders import HashedNgrams
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question
from evolver.parts import Parts
from evolver.questioning.calls import Event, calls_of
from evolver.questioning.goals import Writer, claimed
from evolver.questioning.start_state import Site
from evolver.questioning.tasks import Unfit, check_probe, probe_of
from evolver.questioning.walks import Walker
from evolver.transcripts import quoted, rules_of, shortened, text_of, transcript, words
from rl.bounds import Count, CountOrZero
from rl.seeds import seed_of

_LEVELS = ("easy: one thing to look up or change", "medium: a few steps that depend on each other")
_LEVELS += (
    "hard: several steps that depend on each other, and something that has to be found out first",
)
_CALL = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'


@dataclass
class LlmWalk:
    """(action, observation) of each step of a walk that starts in the world of `start`."""

    start: Task
    opening: Observation
    steps: list[tuple[str, str]] = field(default_factory=list)


class LlmExplorer:
    """Explores the worlds of the seed tasks, whose queries are masked, with the roles `explorer`
    and `writer`."""

    roles, prompts = ("explorer", "writer"), ("explore", "write_tasks")

    def __init__(
        self,
        parts: Parts,
        *,
        breadth: CountOrZero = 3,
        depth: CountOrZero = 17,
        per_walk: Count = 3,
        rounds: Count = 8,
        patience: Count = 32,
        parallel: Count = 8,
    ):
        """breadth, depth: steps of the two phases. per_walk: most tasks of one walk. rounds: most
        walks from one seed task per call of `explore`. patience: walks without a new task after
        which `explore` ends. parallel: concurrent walks.

        Raises ValueError if the world can only present its own tasks."""
        pool = parts.task_pool
        self._make_world, self.chat, self.max_chars = parts.make_world, parts.chat, parts.max_chars
        self.pool, self.progress = pool, parts.progress
        self.breadth, self.depth, self.per_walk = breadth, depth, per_walk
        self.rounds, self.patience, self.parallel = rounds, patience, parallel
        self._walker = Walker(breadth=0, depth=0, branches=1)  # repeats walks and learns from them
        self._embedder = HashedNgrams()  # finds the tasks that the writer is asked not to repeat
        world = parts.make_world()
        try:
            # If the world does not describe itself, draft a profile from the tools of a few tasks.
            self.profile = world.profile() or draft(world.name, tools_of(world, pool.seeds[:8]))
            check_probe(world, pool.seeds[0], probe_of(pool.seeds[0]))
        finally:
            world.close()
        self.preference = preference_text(self.profile)

    def explore(
        self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random
    ) -> Iterator[Task]:
        """Yield new tasks from `parallel` concurrent walks at a time. Raises RunEnds."""
        size, best, fruitless = len(self.pool.tasks), len(self.pool.tasks), 0
        for _ in range(self.rounds):
            seed = rng.getrandbits(63)
            starts = rng.sample(seeds, len(seeds))
            for first in range(0, len(starts), self.parallel):
                for walk, proposals in self._proposals(starts[first : first + self.parallel], seed):
                    yield from self._tasks(
                        world, walk, proposals, random.Random(seed_of(seed, walk.start.id, "tasks"))
                    )
                self.progress(len(self.pool.tasks) - size, budget)
                fruitless = (
                    0
                    if len(self.pool.tasks) > best
                    else fruitless + len(starts[first : first + self.parallel])
                )
                best = len(self.pool.tasks)
                if fruitless >= self.patience:
                    return

    def _proposals(
        self, starts: Sequence[Task], seed: int
    ) -> list[tuple[LlmWalk, list[dict[str, Any]]]]:
        """Walk from each start and return the walks with the writer's proposals, the most confident
        first."""
        with ThreadPoolExecutor(len(starts)) as threads:
            walks = list(
                threads.map(lambda start: self._walk(start, seed_of(seed, start.id)), starts)
            )
        self.pool.count(walks=len(walks), env_steps=sum(len(walk.steps) for walk in walks))
        for _ in range(sum(not walk.steps for walk in walks)):
            self.pool.reject("no step taken", tried=0)
        walks = [walk for walk in walks if walk.steps]
        answers = self.chat.ask(
            [self._writing(walk, seed_of(seed, walk.start.id)) for walk in walks]
        )
        proposals = []
        for walk, answer in zip(walks, answers):
            if isinstance(answer, ChatError):
                self.pool.reject("nothing written", tried=0)
            elif not answer.parsed["tasks"]:
                self.pool.reject("nothing proposed", tried=0)
            else:
                ranked = sorted(
                    answer.parsed["tasks"], key=lambda proposal: -proposal["confidence"]
                )
                proposals.append((walk, ranked[: self.per_walk]))
                for _ in ranked[self.per_walk :]:
                    self.pool.reject("surplus", tried=0)
        return proposals

    # --- exploring --------------------------------------------------------------------------------

    def _walk(self, start: Task, seed: int) -> LlmWalk:
        """Make one walk. It ends early if the chat model does not answer or the world breaks."""
        world, walk = self._make_world(), LlmWalk(start, Observation([]))
        try:
            walk.opening = world.reset(probe_of(start), start.seed)
            for k in range(self.breadth + self.depth):
                (reply,) = self.chat.ask([self._exploring(walk, k, seed_of(seed, "turn", k))])
                if isinstance(reply, ChatError):
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

    def _exploring(self, walk: LlmWalk, k: int, seed: int) -> Question:
        """Return the question for step k of a walk."""
        text = prompt("explore")
        tools = json.dumps(walk.opening.tools, ensure_ascii=False)
        steps, phase = (
            self.breadth + self.depth,
            f"Phase 1, step {k + 1} of {self.breadth}: look at what there is.",
        )
        if k >= self.breadth:
            phase = f"Phase 2, step {k + 1} of {steps}: go deeper into one thing; build upon what you saw last."
        window = walk.steps if k < self.breadth else walk.steps[-self.depth :]
        messages: list[Message] = text.messages(
            profile=profile_text(self.profile, walk.opening.tools),
            rules=rules_of(walk.opening.messages, 4 * self.max_chars),
            tools=f"Its tools: {tools}\nA call is written as\n{_CALL}\n"
            if walk.opening.tools
            else "",
            opening=text_of([m for m in walk.opening.messages if m.get("role") != "system"]),
            phase="" if window else phase,
        )
        for action, observation in window:
            messages.append({"role": "assistant", "content": action})
            messages.append({"role": "user", "content": shortened(observation, self.max_chars)})
        if window:
            messages[-1]["content"] += f"\n\n{phase}"
        return Question("explorer", messages, None, text.version, seed)

    # --- writing ----------------------------------------------------------------------------------

    def _writing(self, walk: LlmWalk, seed: int) -> Question:
        text = prompt("write_tasks")
        known = "\n".join(f"- {query}" for query in self._nearest(walk)) or "(none yet)"
        messages = text.messages(
            profile=quoted(profile_text(self.profile, walk.opening.tools)), preference=self.preference,
            most=str(self.per_walk), known=quoted(known), count=str(len(walk.steps)),
            steps=transcript(walk.steps, self.max_chars),
        )  # fmt: skip
        steps = array(INTEGER, len(walk.steps))
        task = record(query=string(600), confidence=NUMBER, steps=steps, answer=string(400))
        return Question(
            "writer", messages, record(tasks=array(task, self.per_walk)), text.version, seed
        )

    def _nearest(self, walk: LlmWalk, count: int = 12) -> list[str]:
        """Return queries that the writer may repeat: of the same start, then those most similar to
        the actions."""
        nearest = [
            task.query
            for task in self.pool.tasks.values()
            if task.meta.get("source") == walk.start.id
        ]
        others = [task.query for task in self.pool.tasks.values() if task.query not in nearest]
        if others and len(nearest) < count:
            vectors_ND = self._embedder([" ".join(action for action, _ in walk.steps), *others])
            ranked = (vectors_ND[1:] @ vectors_ND[0]).argsort(kind="stable")[::-1]
            nearest += [others[i] for i in ranked[: count - len(nearest)]]
        return nearest[-count:]

    # --- making tasks -----------------------------------------------------------------------------

    def _tasks(
        self, world: World, walk: LlmWalk, proposals: Sequence[dict[str, Any]], rng: random.Random
    ) -> Iterator[Task]:
        """Repeat a walk, learn from it, and yield the tasks of the proposals."""
        site = None
        try:
            site = Site(probe_of(walk.start), world, self._walker.knowledge, rng)
            steps = self._repeated(site, walk, rng)
        except WorldError:
            self.pool.reject("the world broke", tried=0)
            proposals = ()
        for proposal in proposals:
            try:
                task = self._task(site, walk, steps, proposal, rng)
            except Unfit as reason:
                self.pool.reject(str(reason))
            except WorldError:
                self.pool.reject("the world broke")
            else:
                yield task
        self.pool.count(env_steps=site.steps if site else 0)

    def _repeated(self, site: Site, walk: LlmWalk, rng: random.Random) -> list[list[Event]]:
        """Return the calls of each step of a walk after repeating it and finding out what they
        change."""
        made = [calls_of(action, site.operations) for action, _ in walk.steps]
        calls = [Event(name, arguments, "") for step in made for name, arguments in step]
        (repeated,) = self._walker.walks(
            site.world, site.task, rng, site.known, calls, site.operations
        )
        site.steps += len(repeated.events)
        site.learn_roles(repeated.events)
        site.extend(repeated.events)
        rest = iter(repeated.events)  # fewer than were to be made if the episode ended before
        return [[event for _, event in zip(step, rest)] for step in made]

    def _task(
        self,
        site: Site,
        walk: LlmWalk,
        steps: list[list[Event]],
        proposal: dict[str, Any],
        rng: random.Random,
    ) -> Task:
        """Return the task of a proposal. Raises Unfit, with the reason, if there is none."""
        query, answer = proposal["query"].strip(), proposal["answer"].strip()
        numbers = list(dict.fromkeys(proposal["steps"]))
        if problem := unfit_reason(
            query, text_of(walk.opening.messages), [shown for _, shown in walk.steps]
        ):
            raise Unfit(f"query {problem}")
        if not 0 <= proposal["confidence"] <= 1:
            raise Unfit("no such confidence")
        if not numbers or not all(1 <= n <= len(walk.steps) for n in numbers):
            raise Unfit("no such steps")
        if answer and words(answer) in words(query):
            raise Unfit("answer in the query")
        if answer and not site.takes_answers:
            raise Unfit("no way to answer")
        chosen = [event for n in sorted(numbers) for event in steps[n - 1]]
        goal, answer = claimed([event for step in steps for event in step], chosen, query, answer)
        return Writer(site, least=1, most=len(goal.events)).write(
            goal, rng, common={}, query=query, answer=answer
        )

    def state(self) -> dict[str, Any]:
        """Return what was learnt from the walks, as JSON values."""
        return {"knowledge": self._walker.knowledge.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._walker.knowledge.load_state(state["knowledge"])


def profile_text(profile: dict[str, Any], tools: Sequence[Tool] = (), limit: int = 8000) -> str:
    """Return a world's profile as lines of text: entities with their attributes, examples and
    operations.

    tools: those of the current world. If some of them are operations of the profile, the other
    operations are left out, and so are entities with no operation left.
    """
    operations = [*profile.get("operations", ())]
    operations += [
        operation
        for entity in profile.get("entities", ())
        for operation in entity.get("operations", ())
    ]
    offered = {tool["function"]["name"] for tool in tools}.intersection(map(_tool_of, operations))

    def lines_of(operations: Sequence[dict[str, Any]], indent: str) -> list[str]:
        listed = [
            operation for operation in operations if not offered or _tool_of(operation) in offered
        ]
        return [f"{indent}{_operation(operation)}" for operation in listed]

    lines = [str(profile["description"])] if profile.get("description") else []
    for entity in profile.get("entities", ()):
        own = lines_of(entity.get("operations", ()), "    ")
        if entity.get("operations") and not own:
            continue
        attributes, examples = ", ".join(entity.get("attributes", ())), ", ".join(_examples(entity))
        line = f"- {entity['name']}" + (f" ({attributes})" if attributes else "")
        lines += [line + (f", such as {examples}" if examples else ""), *own]
    lines += lines_of(profile.get("operations", ()), "- ")
    return shortened("\n".join(dict.fromkeys(lines)), limit) or "(nothing is known)"


def _tool_of(operation: dict[str, Any]) -> str:
    return str(operation.get("tool", operation["name"]))


def _operation(operation: dict[str, Any]) -> str:
    """Return an operation in one line: name, arguments, start of the description."""
    description = str(operation.get("description", "")).split("\n")[0]
    about = f" ({', '.join(operation['arguments'])})" if operation.get("arguments") else ""
    return f"{operation['name']}{about}" + (
        f": {shortened(description, 160)}" if description else ""
    )


def _examples(entity: dict[str, Any], most: int = 6) -> list[str]:
    """Return examples of an entity: its own, or else strings that match the pattern of its ids."""
    if entity.get("examples"):
        return [str(example) for example in entity["examples"]][:most]
    pattern, examples = str(entity.get("id", "")), []
    for part in pattern.split("|"):
        example = re.sub(r"\[(\w)[^\]]*\]", r"\1", part.replace(r"\d", "1"))
        with contextlib.suppress(re.error):
            examples += [example] if example and re.fullmatch(pattern, example) else []
    return examples[:most]


def preference_text(profile: dict[str, Any]) -> str:
    """Describe the preferred tasks, from `task_preference` or `preference` of the profile. The
    default is the paper's: 2 entities, 3 attributes, 3 operations, hard."""
    wanted = profile.get("task_preference") or profile.get("preference") or {}
    if wanted.keys() & {
        "calls",
        "operations",
        "answers",
        "style",
    }:  # the form of envs/travel/profile.py
        fewest, most = wanted.get("calls", [1, 10])
        text = f"It takes {fewest} to {most} calls, changes up to {wanted.get('operations', 2)} things, and asks"
        text += f" {'at most one question' if wanted.get('answers', 1) else 'no question'}."
        return f"{text} Its style: {wanted['style']}." if wanted.get("style") else text
    entities, operations = wanted.get("num_entities", 2), wanted.get("num_operations", 3)
    level = _LEVELS[min(max(wanted.get("relation_difficulty", 3), 1), 3) - 1]
    return (
        f"It is about up to {entities} entities and {wanted.get('num_attributes', 3)} attributes, takes up to"
        f" {operations} different operations, and is {level}."
    )
