"""Shared by all tests: the CPU, and the same random examples on every run."""

import os

# Before anything imports jax. An accelerator would change the numbers that parity tests compare.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
