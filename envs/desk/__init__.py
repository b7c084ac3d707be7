"""One engine for small worlds of tools with hidden rules. A world is a module of data for it.

    rules.py   hidden rules: the desk call that a house wants before an operation
    tools.py   schemas, checked calls, and the state that they change
    verify.py  the score of an episode: its final state and its answer
    world.py   the World: tasks, episodes, snapshots
    plans.py   tasks: the calls that solve them, and their words
    agent.py   demonstrations by a more or less careless agent

docs/environments.md shows a whole world. `envs.travel` and `envs.home` are two more.
"""

from envs.desk.agent import Careless, Demonstrations
from envs.desk.plans import Plan, Planner, Unfit
from envs.desk.rules import Family, House
from envs.desk.tools import Refused, Tools, names, tool
from envs.desk.verify import Answers, any_of
from envs.desk.world import Desk, DeskWorld

__all__ = [
    "Answers",
    "Careless",
    "Demonstrations",
    "Desk",
    "DeskWorld",
    "Family",
    "House",
    "Plan",
    "Planner",
    "Refused",
    "Tools",
    "Unfit",
    "any_of",
    "names",
    "tool",
]
