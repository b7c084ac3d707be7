"""Self-questioning: the tasks come from exploring the worlds (section 3 of the AgentEvolver paper)."""

from evolver.questioning.curiosity import Questioning
from evolver.questioning.mixture import mixture

__all__ = ["Questioning", "mixture"]
