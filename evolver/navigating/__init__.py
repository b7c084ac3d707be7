"""Self-navigating: earlier attempts guide some of the rollouts (section 4 of the AgentEvolver paper)."""

from evolver.navigating.embed import Embedder, HashedNgrams
from evolver.navigating.experience import Experience
from evolver.navigating.extract import Lesson, extract
from evolver.navigating.memory import Navigating
from evolver.navigating.mixed import plan
from evolver.navigating.pool import Pool, PoolError

__all__ = ["Embedder", "Experience", "HashedNgrams", "Lesson", "Navigating", "Pool", "PoolError", "extract", "plan"]
