"""The template that shows the tools which are asked for, of very many."""

import functools
import itertools

import pytest

from envs import make
from envs.world import Observation, tool_of
from rl import samples
from rl.contexts import Opening
from rl.contexts.retrieved import MORE, Retrieved, index_of
from tests.models.helpers import extend, user
from tests.rl.test_rollout import Script, Scripted, assert_trained_once, limited, play, tokenizer

NAMES = ("red", "oak", "sun", "fog", "elk", "gem", "map", "jar", "owl", "ski")
THINGS = ("Report", "Measure", "Paint", "Polish", "Archive")
OTHERS = [
    tool_of(
        f"{name}_{n}", f"{THINGS[n % 5]} the {name} of box {n}.", {"key": {"type": "string"}}, []
    )
    for n, name in itertools.product(range(50), NAMES)
]


def opened(query, tools, **options):
    seen = Observation([user(query)], tools)
    return Retrieved(Opening(tokenizer(), seen), **options)


def shown(context):
    return tokenizer().decode(context.prompt)


def extended(context, text, answer="ok", tools=None, role="tool"):
    """Extend a context by a turn, and return what it adds to the prompt."""
    before = list(context.prompt)
    extend(context, tokenizer().encode(text), [{"role": role, "content": answer}], tools)
    if tools is None:
        assert context.prompt[: len(before)] == before
    return tokenizer().decode(context.prompt[len(before) :])


@pytest.mark.parametrize("world", ["travel", "home"])
def test_the_tools_of_a_task_are_among_the_first_of_five_hundred_others(world):
    world = make(world)
    kept = needed = 0
    for task in world.tasks("train")[:40]:
        observation = world.reset(task, task.seed)
        context = opened(task.query, [*OTHERS, *observation.tools], first=16)
        assert len(context.prompt) < 2000
        calls = {
            t["function"]["name"]
            for t in observation.tools
            if t["function"]["name"] in str(task.reference)
        }
        needed += len(calls)
        kept += sum(f"\n{name}(" in shown(context) for name in calls)
    assert kept >= 0.8 * needed > 0, (kept, needed)


def test_a_turn_that_names_no_tool_that_is_shown_is_told_of_others():
    tools = [
        tool_of("book_flight", "Book a flight.", {}, []),
        tool_of("feed_cat", "Feed the cat.", {}, []),
        *OTHERS,
    ]
    context = opened("Book a flight to Oslo.", tools, first=1, more=3)
    assert "\nbook_flight()" in shown(context) and "feed_cat" not in shown(context)
    assert MORE not in extended(context, "book_flight()")
    added = extended(context, "Is there something that feeds a cat?")
    assert added.count(MORE) == 1 and "\nfeed_cat(): Feed the cat." in added
    assert added.partition(MORE)[2].count("\n") >= 3
    assert MORE not in extended(context, "feed_cat()")


def test_what_the_user_asks_next_is_looked_up_too():
    context = opened(
        "Report the red.", [tool_of("feed_cat", "Feed the cat.", {}, []), *OTHERS], first=1
    )
    assert "feed_cat" not in shown(context)
    added = extended(context, "red_0()", "Now feed the cat.", role="user")
    assert added.index("Now feed the cat.") < added.index("\nfeed_cat(): Feed the cat.")


def test_tools_that_change_are_retrieved_anew():
    context = opened("Book a flight.", OTHERS, first=4)
    extended(context, "sun_1", tools=[*OTHERS, tool_of("book_flight", "Book a flight.", {}, [])])
    assert "\nbook_flight()" in shown(context)


def test_fewer_tools_than_are_shown_are_all_shown_and_none_may_be():
    assert "\nred_0(key)" in shown(opened("Go.", OTHERS[:1]))
    assert MORE not in extended(opened("Go.", ()), "hello")
    assert index_of(()).nearest("x", 3) == []


def test_generations_train_once_under_growing_prompts():
    template = functools.partial(Retrieved, first=1, more=1)
    world = Script(tools=OTHERS[:40])
    played = play(world, Scripted("one", "two", "done"), limited(max_turns=3), context=template)
    assert played.error == "" and len(played.turns) == 3
    assert_trained_once(played)
    assert samples.samples(played)
