"""Self-questioning by language models: one explores, one writes tasks, and execution decides which
are kept.

As in section 3 of the AgentEvolver paper, a walk has a breadth-first phase of N_b steps and a
depth-first phase in which only the last N_d observations are shown. The writer turns the record of
a walk into tasks of a preferred difficulty.

A task consists of a query and steps of the walk, given by their numbers: only actions of the walk
are executed, never text that the writer made up. The walk is repeated call by call to find out what
its calls change. The task gets the fewest calls that make the chosen changes, and a verifier of
what other calls show afterwards, as the tasks of the embedded explorer do
(evolver/questioning/{start_state,goals}.py). The writer's query and answer are checked against what
the calls showed (evolver/questioning/claims.py).
"""

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain

from envs.profile import draft, tools_of
from envs.world import Message, Task, World, WorldError, first_of_worlds, text_of
from evolver.llm.answers import INTEGER, NUMBER, array, record, string, unfit_reason
from evolver.llm.embedders import HashedNgrams
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError, Question
from evolver.parts import Parts
from evolver.questioning.calls import Episode, Event, Events, Json
from evolver.questioning.claims import shown_answer
from evolver.questioning.goals import Goal, Writer, useful
from evolver.questioning.kinds import start_state
from evolver.questioning.played import repeated, replayer
from evolver.questioning.profiles import preference_text, profile_text
from evolver.questioning.start_state import StartState
from evolver.questioning.tasks import Rejected, check_probe, probe_of, source_of
from evolver.questioning.values import SeenValues
from evolver.transcripts import quoted, rules_of, shortened, transcript, words
from rl.bounds import Count, CountOrZero
from rl.seeds import seed_of

_CALL = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
_LONGEST_QUERY, _LONGEST_ANSWER = 600, 400  # characters that the writer may write
_KNOWN = 12  # queries that the writer is asked not to repeat


class LlmExplorer:
    """Explores the worlds of the seed tasks, whose queries are masked, with the roles `explorer`
    and `writer`."""

    roles = ("explorer", "writer")
    prompts = ("explore", "write_tasks")

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
        assert parts.task_pool is not None  # every explorer gets one
        self._make_world = parts.make_world
        self.chat = parts.chat
        self.max_chars = parts.max_chars
        self.pool = parts.task_pool
        self.breadth = breadth
        self.depth = depth
        self.per_walk = per_walk
        self.rounds = rounds
        self.patience = patience
        self.parallel = parallel
        self._walker = replayer()  # learns from the walks
        self._embedder = HashedNgrams()  # finds the tasks that the writer is asked not to repeat
        with closing(parts.make_world()) as world:
            # If the world does not describe itself, draft a profile from the tools of a few tasks.
            seeds = self.pool.seeds
            self.profile = world.profile() or draft(world.name, tools_of(world, seeds[:8]))
            for first in first_of_worlds(seeds):
                check_probe(world, first)
        self.preference = preference_text(self.profile)

    def explore(
        self, world: World, seeds: Sequence[Task], budget: int, rng: random.Random
    ) -> Iterator[Task]:
        """Yield new tasks from `parallel` concurrent walks at a time. Raises RunEnds."""
        best = len(self.pool.tasks)
        fruitless = 0
        for _ in range(self.rounds):
            seed = rng.getrandbits(63)
            starts = rng.sample(seeds, len(seeds))
            for first in range(0, len(starts), self.parallel):
                batch = starts[first : first + self.parallel]
                for walk, ideas in self._ideas(batch, seed):
                    draws = random.Random(seed_of(seed, source_of(walk.task), "tasks"))
                    yield from self._tasks(world, walk, ideas, draws)
                fruitless = 0 if len(self.pool.tasks) > best else fruitless + len(batch)
                best = len(self.pool.tasks)
                if fruitless >= self.patience or self.pool.is_over():
                    return

    def _ideas(self, starts: Sequence[Task], seed: int) -> list[tuple[Episode, list[Json]]]:
        """Walk from each start and return the walks with the writer's ideas, the most confident
        first."""
        with ThreadPoolExecutor(len(starts)) as threads:
            made = list(threads.map(lambda task: self._walk(task, seed_of(seed, task.id)), starts))
        walks = [walk for walk in made if walk is not None and walk.events]
        self.pool.count(walks=len(made), env_steps=sum(len(walk.events) for walk in walks))
        for _ in range(len(made) - len(walks)):
            self.pool.reject("no step taken", tried=0)
        seeds = [seed_of(seed, source_of(walk.task)) for walk in walks]
        answers = self.chat.ask([self._writing(*pair) for pair in zip(walks, seeds)])
        ideas = []
        for walk, answer in zip(walks, answers):
            if isinstance(answer, ChatError):
                self.pool.reject("nothing written", tried=0)
            elif not answer.parsed["tasks"]:
                self.pool.reject("nothing proposed", tried=0)
            else:
                ranked = sorted(answer.parsed["tasks"], key=lambda idea: -idea["confidence"])
                ideas.append((walk, ranked[: self.per_walk]))
                for _ in ranked[self.per_walk :]:
                    self.pool.reject("surplus", tried=0)
        return ideas

    # --- exploring --------------------------------------------------------------------------------

    def _walk(self, task: Task, seed: int) -> Episode | None:
        """Make one walk, None if it cannot begin. It ends early if the chat model does not answer
        or the world breaks."""
        walk = None
        with closing(self._make_world()) as world:
            try:
                walk = Episode(world, probe_of(task), self._walker.stats.refuses)
                while len(walk.events) < self.breadth + self.depth and not walk.over:
                    question = self._exploring(walk, seed_of(seed, "turn", len(walk.events)))
                    (reply,) = self.chat.ask([question])
                    if isinstance(reply, ChatError):
                        break
                    walk.act(reply.text)
            except WorldError:
                self.pool.reject("the world broke", tried=0)
        return walk

    def _exploring(self, walk: Episode, seed: int) -> Question:
        """Return the question for the next step of a walk."""
        text = prompt("explore")
        step = len(walk.events) + 1
        if step <= self.breadth:
            window = walk.events
            phase = f"Phase 1, step {step} of {self.breadth}: look at what there is."
        else:
            window = walk.events[-self.depth :]
            steps = self.breadth + self.depth
            phase = (
                f"Phase 2, step {step} of {steps}: go deeper into one thing;"
                " build upon what you saw last."
            )
        opening = walk.opening
        tools = ""
        if opening.tools:
            listed = json.dumps(opening.tools, ensure_ascii=False)
            tools = f"Its tools: {listed}\nA call is written as\n{_CALL}\n"
        messages: list[Message] = text.messages(
            profile=profile_text(self.profile, opening.tools),
            rules=rules_of(opening.messages, 4 * self.max_chars),
            tools=tools,
            opening=text_of([m for m in opening.messages if m.get("role") != "system"]),
            phase="" if window else phase,
        )
        for event in window:
            shown = shortened(event.result, self.max_chars)
            messages.append({"role": "assistant", "content": event.action})
            messages.append({"role": "user", "content": shown})
        if window:
            messages[-1]["content"] += f"\n\n{phase}"
        return Question("explorer", messages, None, text.version, seed, walk.task.id)

    # --- writing ----------------------------------------------------------------------------------

    def _writing(self, walk: Episode, seed: int) -> Question:
        known = "\n".join(f"- {query}" for query in self._nearest(walk)) or "(none yet)"
        steps = [(event.action, event.result) for event in walk.events]
        task = record(
            query=string(_LONGEST_QUERY),
            confidence=NUMBER,
            steps=array(INTEGER, len(steps)),
            answer=string(_LONGEST_ANSWER),
        )
        return prompt("write_tasks").question(
            "writer",
            record(tasks=array(task, self.per_walk)),
            seed,
            walk.task.id,
            profile=quoted(profile_text(self.profile, walk.opening.tools)),
            preference=self.preference,
            most=str(self.per_walk),
            known=quoted(known),
            count=str(len(steps)),
            steps=transcript(steps, self.max_chars),
        )

    def _nearest(self, walk: Episode) -> list[str]:
        """Return queries that the writer may repeat: of the same start, then those most similar to
        the actions."""
        source = source_of(walk.task)
        tasks = self.pool.tasks.values()
        nearest = [task.query for task in tasks if task.meta.get("source") == source]
        others = [task.query for task in tasks if task.query not in nearest]
        if others and len(nearest) < _KNOWN:
            actions = " ".join(event.action for event in walk.events)
            vectors_ND = self._embedder([actions, *others])
            ranked = (vectors_ND[1:] @ vectors_ND[0]).argsort(kind="stable")[::-1]
            nearest += [others[i] for i in ranked[: _KNOWN - len(nearest)]]
        return nearest[-_KNOWN:]

    # --- making tasks -----------------------------------------------------------------------------

    def _tasks(
        self, world: World, walk: Episode, ideas: Sequence[Json], rng: random.Random
    ) -> Iterator[Task]:
        """Repeat a walk, learn from it, and yield the tasks of the ideas."""
        try:
            start = start_state(walk.task, world, self._walker.stats, rng, SeenValues())
            steps = repeated(start, [event.action for event in walk.events], self._walker)
            self.pool.count(env_steps=sum(map(len, steps)))
        except WorldError:
            self.pool.reject("the world broke", tried=0)
            return
        for idea in ideas:
            try:
                task = self._task(start, walk, steps, idea)
            except Rejected as reason:
                self.pool.reject(str(reason))
            except WorldError:
                self.pool.reject("the world broke")
            else:
                yield task
        self.pool.count(env_steps=start.take_steps())

    def _task(self, start: StartState, walk: Episode, steps: list[list[Event]], idea: Json) -> Task:
        """Return the task of an idea. Raises Rejected, with the reason, if there is none."""
        query = idea["query"].strip()
        answer = idea["answer"].strip()
        numbers = sorted(set(idea["steps"]))
        problem = unfit_reason(
            query, text_of(walk.opening.messages), [e.result for e in walk.events]
        )
        if problem:
            raise Rejected(f"query {problem}")
        if not 0 <= idea["confidence"] <= 1:
            raise Rejected("no such confidence")
        if not numbers or numbers[0] < 1 or numbers[-1] > len(steps):
            raise Rejected("no such steps")
        if answer and words(answer) in words(query):
            raise Rejected("answer in the query")
        if answer and not start.takes_answers:
            raise Rejected("no way to answer")
        events = list(chain.from_iterable(steps))
        chosen = list(chain.from_iterable(steps[n - 1] for n in numbers))
        goal, answer = _claimed(events, chosen, query, answer)
        writer = Writer(start, least=1, most=len(goal.events))
        return writer.write(goal, common={}, query=query, answer=answer)

    def state(self) -> Json:
        """Return what was learnt from the walks, as JSON values."""
        return {"stats": self._walker.stats.state()}

    def load_state(self, state: Json) -> None:
        """Continue from what `state` returned."""
        self._walker.stats.load_state(state["stats"])


def _claimed(events: Events, chosen: Events, query: str, answer: str) -> tuple[Goal, str]:
    """Return the goal of some calls of a walk that a language model chose, and the answer as one of
    them showed it, "" if nothing is asked. events: all calls of the walk. Raises Rejected, with the
    reason.
    """
    if not all(event.ok for event in chosen):
        raise Rejected("reference fails")
    calls = useful(events)
    places = {id(event): n for n, event in enumerate(calls)}
    last = {event.key: n for n, event in enumerate(calls) if not event.changes}
    targets: list[int] = []
    asked = None
    shown = ""
    for event in reversed(chosen):
        place = places.get(id(event), last.get(event.key))
        if place is None:  # it ends the episode
            continue
        if id(event) in places and event.changes and place not in targets:
            targets.insert(0, place)
        if answer and not shown:
            shown = shown_answer(query, answer, event)
            asked = place if shown else None
    if answer and asked is None:
        raise Rejected("answer not shown")
    if not targets and asked is None:
        raise Rejected("nothing to check")
    return Goal(calls, targets, asked), shown
