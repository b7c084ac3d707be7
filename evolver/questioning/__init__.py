"""Self-questioning: the tasks come from exploring the worlds (section 3 of the AgentEvolver paper)."""

from evolver.questioning.curiosity import Questioning
from evolver.questioning.mixture import mixture
from evolver.questioning.pool import TaskPool

__all__ = ["Questioning", "TaskPool", "mixture"]
