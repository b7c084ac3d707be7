"""Shared by all tests: the CPU, programs that are compiled once, and the same random examples on
every run, and the tiny policy."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import hypothesis
import pytest

from tests.tiny import config_file, tiny_policy

FEW_KERNELS = "--xla_cpu_use_fusion_emitters=false"


def xla_knows(flag: str) -> bool:
    """Return True if XLA knows a flag; one that it does not know ends the process."""
    environment = os.environ | {"XLA_FLAGS": flag}
    code = "import jax.numpy; jax.numpy.arange(2) + 1"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    return not done.returncode


# Before anything imports jax. An accelerator would change the numbers that parity tests compare.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs run for a few milliseconds here, and optimizing one takes seconds.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Kernels that XLA makes by MLIR take twice as long to compile as those that it makes by LLVM alone.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = FEW_KERNELS if xla_knows(FEW_KERNELS) else ""  # for workers, too
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

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def stdout(capsys):
    """Return a function that returns what was printed since the last look at it, or at stderr."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def stderr(capsys):
    """Return a function that returns what was said in stderr since the last look at it, or at what
    was printed."""
    return lambda: capsys.readouterr().err


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="session")
def tiny(policy):
    """The config of short runs of the tiny policy."""
    return config_file(policy.parent, policy)


@pytest.fixture
def checkpoint(policy, tmp_path):
    """A copy of the policy, to damage."""
    return shutil.copytree(policy, tmp_path / "checkpoint")
