"""Seeds are equal in every process, differ between draws, and have 63 bits."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rl.seeds import seed_of

PARTS = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=20), max_size=6).map(tuple)


@given(PARTS, PARTS)
def test_equal_seeds_mean_equal_parts(a, b):
    assert 0 <= seed_of(*a) < 2**63
    assert (seed_of(*a) == seed_of(*b)) == (a == b)


def test_a_seed_is_the_same_in_every_process():
    code = "from rl.seeds import seed_of; print(seed_of(7, 'rollout', 'task-1', 3))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert int(out) == seed_of(7, "rollout", "task-1", 3)


def test_types_matter():
    assert seed_of(1) != seed_of("1")
    assert seed_of("a", "b") != seed_of("ab")
