"""OpenSpiel: games of two players in text. The policy plays both, or against a fixed opponent.

Needs `pip install -r requirements/openspiel.txt`. https://openspiel.readthedocs.io lists the games;
those serve whose players take turns, of which what one wins the other loses, such as tic_tac_toe,
connect_four, kuhn_poker, leduc_poker, liars_dice and nim.
"""

import random
from typing import Any, Literal

from envs import packages
from envs.toolcalls import parse, run_calls
from envs.values import Json
from envs.world import (
    Evaluation,
    Observation,
    StepResult,
    Task,
    World,
    check_split,
    message,
    nothing_done,
    opening,
    tool_of,
)

SPLITS = ("train", "dev", "test")
SEEDS = 1_000_000  # per split: task i has the seed i of its split
Opponent = Literal["self", "random"]
SYSTEM = (
    "You play {game}, a game of two players. What one wins, the other loses. Each turn is one call"
    " of `move` with the number of one of the moves that are listed. Anything else loses the game."
)
NUMBER = {"type": "string", "description": "its number"}
MOVE = tool_of("move", "Make a move.", {"move": NUMBER}, ["move"])


class OpenSpiel(World):
    """One game per episode. The score is the player's payoff as a share of the highest one, from -1
    to 1; the player wins if it is above 0.

    Each observation says all that the player whose turn it is may know, so that the template
    `latest` can show it without what only the other one may. With the opponent "self" both players
    are the policy, `info["player"]` of each turn says which one took it, and the score is player
    0's. Otherwise the policy is player 0 in every other game.

    games: names of OpenSpiel's games, which share a split equally. n_train, n_dev, n_test: games
    per split in all. opponent: of the games to train on. rival: that of dev and test. seed: selects
    what chance and a random opponent do.
    """

    name = "openspiel"

    def __init__(
        self,
        games: tuple[str, ...] | list[str] = ("tic_tac_toe", "kuhn_poker"),
        n_train: int = 96,
        n_dev: int = 48,
        n_test: int = 96,
        opponent: Opponent = "self",
        rival: Opponent = "random",
        seed: int = 0,
    ):
        self._spiel = packages.load("pyspiel", "openspiel")
        self._games = {name: self._load(name) for name in games}
        self._sizes = dict(zip(SPLITS, (n_train, n_dev, n_test)))
        self._opponents = {"train": opponent, "dev": rival, "test": rival}
        self._seed = seed
        self._state: Any = None

    def _load(self, name: str) -> Any:
        """Return a game of OpenSpiel. Raises ValueError for one that this world cannot play."""
        try:
            game = self._spiel.load_game(name)
        except self._spiel.SpielError as error:
            raise ValueError(f"OpenSpiel has no game {name!r}: {error}") from None
        kind = game.get_type()
        turns = kind.dynamics == self._spiel.GameType.Dynamics.SEQUENTIAL
        if game.num_players() != 2 or not turns or game.utility_sum() != 0:
            raise ValueError(
                f"the game {name} is not one of two players who take turns, of which what one wins"
                " the other loses"
            )
        return game

    def tasks(self, split: str) -> list[Task]:
        check_split(self.name, split, SPLITS)
        names, opponent = list(self._games), self._opponents[split]
        tasks = []
        for i in range(self._sizes[split]):
            game, number = names[i % len(names)], i // len(names)
            player = 0 if opponent == "self" else number % 2
            tasks.append(
                Task(
                    id=f"openspiel/{game}/{split}/{self._seed}/{number}",
                    env=self.name,
                    query=f"Win a game of {game}.",
                    split=split,
                    seed=SEEDS * (3 * self._seed + SPLITS.index(split)) + number,
                    meta={"game": game, "opponent": opponent, "player": player},
                )
            )
        return tasks

    def reset(self, task: Task, seed: int = 0) -> Observation:
        name = task.meta.get("game")
        if name not in self._games:
            raise ValueError(f"task {task.id} is no game of {', '.join(self._games)}")
        alone = task.meta.get("opponent", "self") == "self"
        self.restore([name, seed, alone, int(task.meta.get("player", 0)), [], -1])
        self._play_others()
        system = SYSTEM.format(game=self._game.get_type().long_name)
        return Observation(opening(system, self._seen()), [MOVE])

    def step(self, action: str) -> StepResult:
        """Make the move of the player whose turn it is. `info["player"]` says who that was."""
        self._require_episode()
        if self._over:
            return nothing_done()
        player = self._state.current_player()
        messages, info = run_calls(parse(action), self._call, 1)
        if info["errors"] or not info["calls"]:
            self._forfeit = player
            messages = messages or [message("user", "No move was made.")]
        info["player"] = player
        return StepResult(messages, terminated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        self._require_episode()
        score = 0.0
        if self._forfeit >= 0:
            score = -1.0 if self._forfeit == self._player else 1.0
        elif self._state.is_terminal():
            score = self._state.returns()[self._player] / self._game.max_utility()
        return Evaluation(score, score > 0, low=-1.0, high=1.0)

    def snapshot(self) -> Any:
        self._require_episode()
        own = (self._name, self._start, self._alone, self._player)
        return [*own, self._state.history(), self._forfeit]

    def restore(self, snapshot: Any) -> None:
        self._name, self._start, self._alone, self._player, history, self._forfeit = snapshot
        self._game = self._games[self._name]
        self._state = self._game.new_initial_state()
        for move in history:
            self._state.apply_action(move)

    @property
    def _over(self) -> bool:
        return self._forfeit >= 0 or self._state.is_terminal()

    def _call(self, name: str, arguments: Json) -> tuple[str, bool]:
        said = str(arguments.get("move", "")).strip()
        moves = {str(action): action for action in self._state.legal_actions()}
        if name != "move" or said not in moves:
            return f"error: {name}({said}) is none of the moves: {self._moves()}", False
        self._state.apply_action(moves[said])
        self._play_others()
        return self._seen(), True

    def _moves(self) -> str:
        """Return the moves of the player whose turn it is, each with its number."""
        state, player = self._state, self._state.current_player()
        return ", ".join(
            f"{a} = {state.action_to_string(player, a)}" for a in state.legal_actions()
        )

    def _play_others(self) -> None:
        """Let chance, and an opponent, act until it is the policy's turn."""
        state = self._state
        while not state.is_terminal():
            draws = random.Random(f"{self._start}/{len(state.history())}")
            if state.is_chance_node():
                outcomes, weights = zip(*state.chance_outcomes())
                state.apply_action(draws.choices(outcomes, weights)[0])
            elif self._alone or state.current_player() == self._player:
                return
            else:
                state.apply_action(draws.choice(state.legal_actions()))

    def _seen(self) -> str:
        """Return what the player whose turn it is may know."""
        state, kind = self._state, self._game.get_type()
        if state.is_terminal():
            return "The game is over."
        player = state.current_player()
        hidden = kind.information != self._spiel.GameType.Information.PERFECT_INFORMATION
        if hidden and kind.provides_information_state_string:
            view = state.information_state_string(player)
        else:
            view = state.observation_string(player)
        return f"You are player {player}.\n{view}\nMoves: {self._moves()}"

    def _require_episode(self) -> None:
        if self._state is None:
            raise RuntimeError("no episode: reset the world first")
