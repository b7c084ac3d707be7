"""Faults of everything that a run depends on, each in a short real run: `python -m
tests.faults`."""
