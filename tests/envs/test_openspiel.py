"""Games of OpenSpiel, the template that shows each player its own view, and the advantages of
players."""

import asyncio
import json

import numpy as np
import pytest

from envs import make
from envs.openspiel import OpenSpiel
from envs.toolcalls import call_text
from envs.world import Evaluation, Observation, Task
from rl.advantages import Batch
from rl.advantages.batch import estimate
from rl.advantages.spiral import Spiral
from rl.contexts import Opening
from rl.contexts.latest import Latest
from rl.trajectory import Completion
from tests.envs.playing import assert_conforms
from tests.evolver.toy import TOOLS
from tests.rl.test_samples import trajectory, turn

pyspiel = pytest.importorskip("pyspiel")


def move(number) -> str:
    return call_text("move", {"move": number})


def played(world, task, *moves):
    """Return the results of some moves from the start of a task."""
    world.reset(task, task.seed)
    return [world.step(move(number)) for number in moves]


@pytest.mark.parametrize("opponent", ["self", "random"])
def test_it_conforms(opponent):
    games = ("tic_tac_toe", "kuhn_poker", "leduc_poker", "liars_dice", "nim")
    sizes = {"n_train": 5, "n_dev": 5, "n_test": 5}
    assert_conforms(lambda: make("openspiel", games=games, opponent=opponent, **sizes), limit=5)


def test_both_players_are_the_policy_and_the_score_is_the_first_ones():
    world = OpenSpiel(("tic_tac_toe",), n_train=1)
    (task,) = world.tasks("train")
    results = played(world, task, 0, "3", 1, 4, 2)
    assert [r.info["player"] for r in results] == [0, 1, 0, 1, 0]
    assert [r.terminated for r in results] == [False] * 4 + [True]
    assert world.evaluate() == Evaluation(1.0, True, low=-1.0, high=1.0)
    shown = results[0].messages[0]["content"]
    assert "You are player 1.\nx..\n...\n...\nMoves: 1 = o(0,1)" in shown
    played(world, task, 0, 3, 1, 4, 8, 5)
    assert world.evaluate().score == -1.0 and not world.evaluate().success


def test_the_scores_are_those_of_the_library():
    """Random games, played by the world and by OpenSpiel alone."""
    rng = np.random.default_rng(0)
    world = OpenSpiel(("leduc_poker", "nim"), n_train=20)
    for task in world.tasks("train"):
        world.reset(task, task.seed)
        while not world.snapshot()[5] >= 0 and not world._state.is_terminal():
            world.step(move(int(rng.choice(world._state.legal_actions()))))
        game = pyspiel.load_game(task.meta["game"])
        state = game.new_initial_state()
        for action in world.snapshot()[4]:
            state.apply_action(action)
        assert state.is_terminal()
        assert world.evaluate().score == state.returns()[0] / game.max_utility()


@pytest.mark.parametrize(
    "said", [move(9), move("x"), "nothing", "<tool_call>", call_text("go", {})]
)
def test_whoever_makes_no_move_loses(said):
    world = OpenSpiel(("tic_tac_toe",), n_train=1)
    (task,) = world.tasks("train")
    world.reset(task, task.seed)
    assert world.step(said).terminated and world.evaluate().score == -1.0
    world.reset(task, task.seed)
    world.step(move(0))
    result = world.step(said)
    assert result.terminated and result.info["player"] == 1 and result.messages
    assert world.evaluate().score == 1.0


def test_a_rival_moves_alike_in_equal_games_and_the_policy_is_either_player():
    world, again = (OpenSpiel(("tic_tac_toe",), n_dev=4) for _ in range(2))
    tasks = world.tasks("dev")
    assert [t.meta["player"] for t in tasks] == [0, 1, 0, 1]
    first, second = (
        [w.reset(task, task.seed).messages[1]["content"] for task in tasks] for w in (world, again)
    )
    assert first == second
    assert ["player 1" in text for text in first] == [False, True, False, True]
    boards = ["".join(text.split("\n")[1:4]) for text in first]
    assert [board.count("x") for board in boards] == [0, 1, 0, 1]  # the rival has moved
    world.reset(tasks[1], tasks[1].seed)
    world.step("resigned")
    assert world.evaluate().score == -1.0


@pytest.mark.parametrize(
    "game, why", [("chezz", "no game"), ("blackjack", "two players"), ("goofspiel", "take turns")]
)
def test_games_that_cannot_be_played_are_refused(game, why):
    with pytest.raises(ValueError, match=why):
        OpenSpiel((game,))


def test_a_task_of_another_world_is_refused():
    with pytest.raises(ValueError, match="no game of tic_tac_toe"):
        OpenSpiel(("tic_tac_toe",)).reset(Task("a", "openspiel", "q"))


# --- each player sees its own -------------------------------------------------------------------


class Words:
    """A tokenizer of whole texts, for templates."""

    thinking = False


def test_each_prompt_is_the_system_message_and_what_was_seen_last(monkeypatch):
    written = []
    monkeypatch.setattr(
        "models.chat.opening", lambda _, messages, tools=(): written.append(messages) or [1, 2]
    )
    told = {"role": "system", "content": "Rules."}
    opening = Observation([told, {"role": "user", "content": "Your card: K"}], [])
    context = Latest(Opening(Words(), opening, ["Bet."], show_tools=False))
    seen = [{"role": "tool", "content": "Your card: Q"}, {"role": "tool", "content": "It bet."}]
    asyncio.run(context.extend(Completion([7], [0.0], "stop", 0), seen, TOOLS))
    shown, plain = written[-2:]
    assert shown[1]["content"].endswith("Your card: Q\nIt bet.") and "Bet." in shown[1]["content"]
    assert plain == [told, {"role": "user", "content": "Your card: Q\nIt bet."}]
    assert context.prompt == [1, 2] and context._tools == TOOLS


# --- the advantages of players ------------------------------------------------------------------


def game(score, *players, meta=None):
    """Return a game with a score in [-1, 1], of turns of these players."""
    made = trajectory(*(turn([1], [2]) for _ in players))
    for one, player in zip(made.turns, players):
        one.info = {} if player is None else {"calls": [], "player": player}
    made.task.meta = {"game": "nim"} if meta is None else meta
    made.evaluation = Evaluation(score, score > 0, low=-1.0, high=1.0)
    return made


def test_each_player_of_each_game_has_its_own_moving_mean():
    estimator = Spiral(decay=0.5)
    batch = Batch.of([game(1.0, 0, 1, 0), game(1.0, 0, 1)], 1)
    # b = 1/2, then 3/4 for the first player, and the opposite for the second
    expected = [[0.5, -0.5, 0.5], [0.25, -0.25, 0.0]]
    np.testing.assert_allclose(estimate(estimator, batch), expected)
    again = Spiral(decay=0.5)
    again.load_state(json.loads(json.dumps(estimator.state())))
    other = game(-1.0, 1, meta={"game": "go"})
    late = Batch.of([game(-1.0, 0, 1), other], 2)
    np.testing.assert_allclose(estimate(again, late), [[-1 + 0.125, 1 - 0.125], [0.5, 0.0]])


def test_the_outcome_is_that_of_the_player_that_the_task_names():
    value = estimate(Spiral(decay=0.5), Batch.of([game(1.0, 1, meta={"player": 1})], 1))
    np.testing.assert_allclose(value, [[0.5]])


def test_a_turn_that_the_world_did_not_see_has_no_advantage_but_others_need_a_player():
    value = estimate(Spiral(decay=0.5), Batch.of([game(-1.0, 0, 1, None)], 1))
    np.testing.assert_allclose(value, [[-0.5, 0.5, 0.0]])
    nobodys = game(1.0, 0)
    nobodys.turns[0].info = {"calls": []}
    with pytest.raises(ValueError, match="does not say whose turn"):
        estimate(Spiral(), Batch.of([nobodys], 1))
