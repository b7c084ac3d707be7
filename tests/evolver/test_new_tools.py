"""Exploring a box office, some of whose tools are offered only once it is open, and a sale of which
can be taken back."""

import asyncio
import random

import pytest

from envs.probed import probed
from envs.toolcalls import parse, run_calls
from envs.world import Evaluation, Observation, StepResult, Task, World, tool_of
from evolver.imitating import turns_of
from evolver.replaying import calls_of, play
from experiments.imitation.bpe import train_bpe
from rl.contexts.causal import Causal
from tests.evolver.explorers import curious

FILM = {"film": {"type": "string", "description": "The name of a film."}}
FILMS = ["Ran", "Alien", "Metropolis", "Vertigo", "Playtime", "Stalker"]
FIRST = [
    tool_of("films", "List the films with the seats that are sold, in order.", {}, []),
    tool_of("open_office", "Open the office.", {}, []),
    tool_of("is_open", "Show if the office is open.", {}, []),
]
LATER = [
    tool_of("sell", "Sell a seat in a film.", FILM, ["film"]),
    tool_of("sell_surprise", "Sell a seat in a film that is kept secret.", {}, []),
    tool_of("undo", "Take the last sale back.", {}, []),
]


class Office(World):
    name = "office"

    def tasks(self, split):
        return [Task(f"{split}/{n}", self.name, "Open.", split, seed=n) for n in range(8)]

    def reset(self, task, seed=0):
        self.films = random.Random(task.seed).sample(FILMS, 4)
        self.open = False
        self.sold = []
        return Observation([{"role": "user", "content": task.query}], FIRST)

    def step(self, action):
        was_open = self.open
        messages, info = run_calls(parse(action), self.call, most=1)
        tools = [*FIRST, *LATER] if self.open and not was_open else None
        return StepResult(messages, terminated=not messages, tools=tools, info=info)

    def call(self, name, given):
        film = given.get("film", "surprise")
        if name == "films":
            return "\n".join([*self.films, *(f"sold {film}" for film in self.sold)]), True
        if name == "is_open":
            return "yes" if self.open else "no", True
        if name == "open_office":
            self.open = True
            return "welcome", True
        if not self.open or name not in ("sell", "sell_surprise", "undo"):
            return "error: no such tool now", False
        if name == "undo":
            return (f"no {self.sold.pop()}", True) if self.sold else ("error: no sale", False)
        if film not in (*self.films, "surprise"):
            return "error: no such film", False
        self.sold.append(film)
        return f"one seat in {film}", True

    def evaluate(self):
        return Evaluation(float(self.open), self.open)


class OpenOffice(Office):
    """An office that is open."""

    def reset(self, task, seed=0):
        seen = super().reset(task, seed)
        self.open = True
        return Observation(seen.messages, [FIRST[0], *LATER])


def explored(kind):
    return curious(lambda: probed(kind()), rounds=16).explore(0, 30)


@pytest.fixture(scope="module")
def tasks():
    return explored(Office)


def test_tools_that_are_offered_later_are_asked_for(tasks):
    sales = [task for task in tasks if task.meta["template"] == "sell"]
    assert sales
    for task in sales:
        assert [call.name for call in calls_of(task)][-2:] == ["open_office", "sell"]
        assert "open_office" in task.meta["prerequisites"]


def test_no_task_asks_for_taking_back_what_it_does_not_ask_for():
    names = [task.meta["template"] for task in explored(OpenOffice)]
    assert "sell" in names and not [name for name in names if name.startswith("undo")]


def test_a_demonstration_lists_the_tools_from_when_they_are_offered(tasks):
    task = next(task for task in tasks if task.meta["template"] == "sell")
    episode = play(Office(), task, task.seed, task.reference)
    tokenizer = train_bpe(["Sell a seat in a film."], 300)
    made = turns_of(episode["messages"], tokenizer, episode["tools"], Causal)
    prompts = [tokenizer.decode(turn.prompt) for turn in asyncio.run(made)]
    names = [call.name for call in calls_of(task)]
    listed = ["Sell a seat in a film." in prompt for prompt in prompts]
    assert listed == [n > names.index("open_office") for n in range(len(prompts))]
