"""Shared by all tests: the CPU, programs that are compiled once, and the same random examples on
every run."""

import atexit
import os
import shutil
import signal
import tempfile

# Before anything imports jax. An accelerator would change the numbers that parity tests compare.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs run for a few milliseconds here, and optimizing one takes seconds.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# A program that one test compiled is read by the next, in this process and in those that it starts.
# Smaller ones are compiled in less time than they are read in.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="evolver-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

# A shell that runs the tests in the background (`make test &`) has them ignore Ctrl-C, and so the
# runs that they stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
