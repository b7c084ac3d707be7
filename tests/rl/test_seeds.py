"""Seeds are equal in every process, differ between draws, and have 63 bits."""

from hypothesis import example, given
from hypothesis import strategies as st

from rl.seeds import seed_of

PARTS = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=20), max_size=6).map(tuple)


@given(PARTS, PARTS)
@example((1,), ("1",))
@example(("a", "b"), ("ab",))
def test_equal_seeds_mean_equal_parts(a, b):
    assert 0 <= seed_of(*a) < 2**63
    assert (seed_of(*a) == seed_of(*b)) == (a == b)


def test_a_seed_is_the_same_in_every_process():
    """The number is what another process found."""
    assert seed_of(7, "rollout", "task-1", 3) == 8423805449927185130
