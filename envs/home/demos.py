"""Demonstrations in smart homes (envs/desk/agent.py)."""

import itertools

from envs.desk.agent import MAX_CALLS, Careless, Demonstrations, Made
from envs.home.data import KINDS, PEOPLE, ROOMS, VALUES
from envs.home.devices import CHANGES, HOMES, LOOKS
from envs.home.world import SmartHome

# Words that are copied from observations get one token each, so that copying takes one token for
# every kind of id. So do the letters of ids: behind a space, "H" would be another token than behind
# a quotation mark.
TOKENS = (
    SmartHome.desk.system,
    *"RDLHSB",
    *(str(number) for number in range(10, 100)),
    *ROOMS,
    *PEOPLE,
    *KINDS,
    *(value for value in itertools.chain(*VALUES.values()) if not value.isdigit()),
    *HOMES.desk,
    *CHANGES,
    *(tool["function"]["name"] for tool in LOOKS),
)
ORIGIN = "The demonstrations come from homes of their own; none of them is the home of a task."


class Agent(Careless):
    """A careless resident."""

    def next(self) -> Made | None:
        if self.refused and self.made == MAX_CALLS:
            self.slip("insist")  # a draw of earlier versions, which decides what comes after it
        return super().next()


demonstrate = Demonstrations(SmartHome, Agent).demonstrate
