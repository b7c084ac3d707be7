"""Self-attributing: every step is told whether it helped (section 5 of the AgentEvolver paper)."""

from evolver.attributing.replay import ABSTAIN, BAD, GOOD, ReplayJudge, label

__all__ = ["ABSTAIN", "BAD", "GOOD", "ReplayJudge", "label"]
