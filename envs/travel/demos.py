"""Scripted demonstrations by a careful or careless agent: what a base policy imitates before any learning by reward.

The agent always writes correct syntax and copies ids and names correctly. The more careless, the worse its habits: it
books without a quote, takes the first row whatever was asked, cancels where it could refund, forgets the second half
of an order, gives up after an error, answers with another column. Each right continuation keeps a probability that
sampling meets, so that reward can find it. With an experience in front of the query it follows the tools named there
and slips less: a policy that imitates it learns to heed experience.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from envs.toolcalls import call_text
from envs.travel.data import CARDS, CITIES, DAYS, FARES, NAMES, SEATS, TIMES, Data, data
from envs.travel.profile import describe
from envs.travel.tasks import HELD_OUT, WORLDS, Draft, Step, Unfit, draft, is_training_world, split_tasks, task_of
from envs.travel.world import SYSTEM, Travel

CARE = 0.15
LOOKUPS = {"flights", "people", "quote", "orders", "order", "seats"}
MAX_CALLS = 12
LEVELS = (1, 2, 3, 4, 5, 6)  # of the tasks shown, each as often
COMPOSED = 0.6  # share of demonstrations of any `compositions`; the others are of the templates that tasks have

# What is copied from observations, as tokens of their own: then copying is one step, the same for every kind of id.
TOKENS = (
    SYSTEM,
    *(str(number) for number in range(10, 100)),
    *CITIES,
    *NAMES,
    *DAYS,
    *TIMES,
    *FARES,
    *CARDS,
    *(f"{row}{letter}" for row in range(1, 10) for letter in SEATS),
)

# How often a slip happens at care 0; it happens (1 - care) times as often.
SLIPS = {
    "skip": 0.6,  # leave a look-up out and go on with the next call
    "choose": 0.75,  # take the first row, or any other
    "drop": 0.6,  # cancel instead of refund, refund instead of cancel
    "forget": 0.55,  # end after a sub-goal though more was asked
    "stop": 0.05,  # end anywhere
    "give up": 0.4,  # end after an error
    "insist": 0.35,  # repeat the call that was refused
    "repeat": 0.08,  # repeat a call that went through
    "wander": 0.1,  # a look-up that is not needed
    "answer": 0.5,  # answer with another column, or not at all
}

# How much of a slip is left with an experience in front: it tells the tools and their order, not which row is meant.
HINTED = dict.fromkeys(SLIPS, 0.25) | {"choose": 0.5, "drop": 0.5, "answer": 0.5}


def hint_text(tools: list[str], when: str) -> str:
    """The content of an experience: "When asked to add a bag to X: order, bag."."""
    return f"{when}: {', '.join(tools)}."


def experience_block(contents: list[str]) -> str:
    """What goes in front of the first user message."""
    return "<EXP>" + "\n".join(contents) + "</EXP>\n"


def when_text(query: str) -> str:
    """When to use an experience: the query without what belongs to one task, its names, ids, days and numbers.

    "Add a bag to order O12." gives "When asked to add a bag to order X", "Who travels on order O12?" gives
    "When asked who travels on order X".
    """
    first, *rest = re.findall(r"[A-Z]?[0-9]+|[A-Za-z]+|'s", query) or [""]
    words = [first.lower()] + [word if word.islower() else "X" for word in rest]
    asked = "When asked" if query.rstrip().endswith("?") else "When asked to"
    return " ".join([asked, *words]).replace(" 's", "'s")


@functools.lru_cache(maxsize=8)
def reserved(n_train: int = 64, n_dev: int = 48, n_test: int = 96, seed: int = 0) -> frozenset[tuple[int, str]]:
    """(world, query) of the tasks of the splits, which no demonstration may show."""
    sizes = {"train": n_train, "dev": n_dev, "test": n_test}
    return frozenset((task.seed, task.query) for split, n in sizes.items() for task in split_tasks(split, n, seed))


def demonstration(
    world_seed: int,
    rng: random.Random,
    *,
    care: float = CARE,
    hint: float = 0.0,
    level: int | None = None,
    template: str | None = None,
    exclude: frozenset[tuple[int, str]] | None = None,
) -> dict[str, Any]:
    """One episode of the careless agent on a fresh random task of a training world.

    `care` in [0, 1]: 1 never slips. `hint` is the probability of an experience in front of the query. `exclude` are the
    (world, query) that must not be shown, `reserved()` unless given. Returns {"messages": [{"role", "content"}, ...],
    "success": bool, "difficulty": int, "template": str, "hinted": bool}.
    """
    exclude = reserved() if exclude is None else exclude
    if not is_training_world(world_seed):
        raise ValueError(f"world {world_seed} is not a training world: those are 0 to {WORLDS - 1}")
    while True:
        plan = draft(world_seed, rng, level=level, template=template)
        if (world_seed, plan.query) not in exclude:
            break
    task = task_of(plan)
    world = Travel()
    messages = world.reset(task).messages
    hinted = rng.random() < hint
    if hinted:
        messages = [messages[0], {"role": "user", "content": _hint(plan, rng) + task.query}]
    agent = _Careless(plan, rng, odds(care, hinted))
    while True:
        action = agent.act()
        messages.append({"role": "assistant", "content": action})
        result = world.step(action)
        if result.terminated:
            break
        messages += result.messages
        agent.observe(result.messages[0]["content"], result.info["calls"][0]["ok"])
    success = world.evaluate().success
    world.close()
    return {
        "messages": messages,
        "success": success,
        "difficulty": task.difficulty,
        "template": plan.template,
        "hinted": hinted,
    }


def demonstrate(rng: random.Random, *, care: float = CARE, hint: float = 0.0) -> dict[str, Any]:
    """`demonstration` in a training world that has something to ask for, drawn from `rng`."""
    while True:
        level, template = rng.choice(LEVELS), rng.choice(compositions()) if rng.random() < COMPOSED else None
        try:
            return demonstration(rng.randrange(WORLDS), rng, care=care, hint=hint, level=level, template=template)
        except Unfit:
            continue


@functools.cache
def compositions() -> tuple[str, ...]:
    """One or two segments of any kind, but for the pairs and chains held out: two goals are imitated in general, not
    from the few pairs that the tasks use."""
    asks = {"order": ("name", "to"), "trip": (), "book": (), "city": ("flights",), "passenger": ("card", "orders")}
    operations = {"order": ("bag", "seat", "drop"), "trip": ("bag", "seat", "drop"), "book": ("bag", "seat")}
    singles = ["book"]
    for subject, ask in asks.items():
        does = operations.get(subject, ())
        singles += [f"{subject}.{one}" for one in (*does, *ask)]
        singles += [f"{subject}.{one}.{two}" for one in does for two in (*does, *ask) if one not in (two, "drop")]
    held_out = {_parts(template) for templates in HELD_OUT.values() for template in templates}
    pairs = [f"{one}+{two}" for i, one in enumerate(singles) for two in singles[i:] if _asks(one) + _asks(two) < 2]
    return tuple(template for template in singles + pairs if _parts(template) not in held_out)


def _parts(template: str) -> frozenset[str]:
    return frozenset(template.split("+"))


def _asks(template: str) -> bool:
    return template.endswith((".name", ".to", ".flights", ".card", ".orders"))


def odds(care: float, hinted: bool) -> dict[str, float]:
    """How often each slip happens."""
    return {name: p * (1 - care) * (HINTED[name] if hinted else 1) for name, p in SLIPS.items()}


def _hint(plan: Draft, rng: random.Random) -> str:
    """An experience from a like task elsewhere, now and then with one that does not fit beside it.

    Reorders the steps of `plan` to the order of the experience where both have the same ones.
    """
    like = draft(rng.randrange(WORLDS), rng, template=plan.template)
    contents = [hint_text([step.tool for step in like.steps], when_text(like.query))]
    if rng.random() < 0.2:
        other = draft(rng.randrange(WORLDS), rng)
        contents.insert(rng.randrange(2), hint_text([step.tool for step in other.steps], when_text(other.query)))
    wanted, rest = [], list(plan.steps)
    for step in like.steps:
        match = next((mine for mine in rest if _kind(mine.tool) == _kind(step.tool)), None)
        if match is not None:
            rest.remove(match)
            wanted.append(match)
    if not rest and [step.goal for step in like.steps] == [step.goal for step in wanted]:
        plan.steps[:] = wanted
    return experience_block(contents)


def _kind(tool: str) -> str:
    return "drop" if tool in ("cancel", "refund") else tool


class _Careless:
    """Follows the plan and slips."""

    def __init__(self, plan: Draft, rng: random.Random, odds: dict[str, float]):
        self.plan, self.rng, self.odds = plan, rng, odds
        self.data: Data = data(plan.world)
        self.pending: list[Step] = list(plan.steps)
        self.seen = plan.query  # every text it may copy from
        self.choices: dict[str, str] = {}  # what it took for an id of the plan
        self.seats: list[str] = []  # the rows of the last list of seats
        self.step: Step | None = None  # the last call: of which step, which tool, what came of it
        self.call: tuple[str, dict[str, str]] | None = None
        self.refused = self.finished = False
        self.ran: set[str] = set()  # tools that went through
        self.calls = 0

    def act(self) -> str:
        call = self._next() if self.calls < MAX_CALLS else None
        if call is None:
            return self._final()
        self.calls += 1
        self.call = call
        return call_text(*call)

    def observe(self, text: str, ok: bool) -> None:
        self.refused, self.finished = not ok, False
        if ok:
            self.seen += "\n" + text
            self.ran.add(self.call[0])
            if self.call[0] == "seats":
                self.seats = text.split("\n")
                self.choices.pop("seat", None)
            if self.step in self.pending:
                self.pending.remove(self.step)
                self.finished = all(step.goal != self.step.goal for step in self.pending)

    def _next(self) -> tuple[str, dict[str, str]] | None:
        """The next call, of the plan or a slip; None to end."""
        if self.call and self._slips("stop"):
            return None
        if self.refused:
            if self._slips("give up"):
                return None
            if self._slips("insist"):
                return self.call
        elif self.call and self._slips("repeat"):
            self.step = None
            return self.call
        elif self.finished and self.pending and self._slips("forget"):
            return None
        elif self.pending and self._slips("wander"):
            self.step = None
            return self._wander()
        if not self.pending:
            return None
        self.step = self.pending[0]
        after = [step for step in self.pending[1:] if step.goal == self.step.goal]
        if self.step.tool in LOOKUPS and after and not self.refused and self._slips("skip"):
            self.step = after[0]
        return self._fill(self.step)

    def _slips(self, name: str) -> bool:
        return self.rng.random() < self.odds[name]

    def _fill(self, step: Step) -> tuple[str, dict[str, str]]:
        """The call of a step, with what it takes for its ids; an id that it has not seen is replaced by a word."""
        tool = step.tool
        if tool in ("cancel", "refund") and self._slips("drop"):
            tool = "cancel" if tool == "refund" else "refund"
        return tool, {name: self._take(name, value) for name, value in step.arguments.items()}

    def _take(self, name: str, value: str) -> str:
        if name in ("to", "name", "id"):
            return value
        if name == "seat":
            return self._take_seat(SEATS[value[1]])
        if name == "passenger":
            return value if value in self.seen else self.data.passengers[value].name
        if value not in self.seen:
            if name == "order":
                return self.data.flights[self.data.orders[value].flight].city if value in self.data.orders else "it"
            return self.data.flights[value].city
        if value not in self.choices:
            self.choices[value] = self._choose(value, self._rows(value))
        return self.choices[value]

    def _rows(self, id: str) -> list[str]:
        """What a flight or an order can be mistaken for: the rows of the list in which the agent finds it."""
        if id in self.data.flights:
            return [flight.id for flight in self.data.flights_to(self.data.flights[id].city)]
        if id in self.data.orders and id not in self.plan.query:
            return [order.id for order in self.data.orders_of(self.data.orders[id].passenger)]
        return [id]

    def _choose(self, right: str, rows: list[str]) -> str:
        """One of the rows: mostly the first when it slips."""
        if not self._slips("choose"):
            return right
        return rows[0] if self.rng.random() < 0.7 else self.rng.choice(rows)

    def _take_seat(self, kind: str) -> str:
        if not self.seats:
            return kind
        right = next((row for row in self.seats if row.startswith(kind)), self.seats[0])
        if "seat" not in self.choices:
            self.choices["seat"] = self._choose(right, self.seats).split()[-1]
        return self.choices["seat"]

    def _wander(self) -> tuple[str, dict[str, str]]:
        """A look-up of something it has seen."""
        ids = [(id[0], id) for id in sorted(set(re.findall(r"[FPO]\d\d", self.seen)))]
        names = [p.name for p in self.data.passengers.values() if p.name in self.seen]
        cities = sorted({f.city for f in self.data.flights.values() if f.city in self.seen})
        calls = [("orders", {"passenger": id}) for kind, id in ids if kind == "P"]
        calls += [("order", {"id": id}) for kind, id in ids if kind == "O"]
        calls += [("seats", {"order": id}) for kind, id in ids if kind == "O"]
        calls += [("quote", {"flight": id}) for kind, id in ids if kind == "F"]
        calls += [("people", {"name": name}) for name in names] + [("flights", {"to": city}) for city in cities]
        return self.rng.choice(calls)

    def _final(self) -> str:
        if self.plan.ask is None:
            return "done"
        entity, id, attribute = self.plan.ask
        known = describe(self.data, entity, self.choices.get(id) or self._choose(id, self._rows(id)))
        value = known[attribute]
        if self._slips("answer"):
            others = [other for key, other in known.items() if key not in (attribute, "phrases") and other]
            value = self.rng.choice(others + ["done"])
        # A count is seen when its list was; everything else is copied.
        return value if value in self.seen or attribute in self.ran else "done"
