"""Who writes a user's key, learned from keys of the same family."""

import pytest

from tracedstore.common.keys import fold_numbers
from tracedstore.diagnosis.observe.blocked_calls import learned_writers
from tracedstore.local.facts import WrittenFamily


def wrote(key: str, *positions: int) -> tuple[WrittenFamily, ...]:
    """Return that a rank wrote the family of a key, with its rank at positions."""
    family, _ = fold_numbers(key)
    return (WrittenFamily(family=family, last_key=key, rank_positions=positions),)


def test_only_writer_of_a_family_writes_the_next_key() -> None:
    """Rank 3 wrote epoch/1/go, so it writes epoch/2/go."""
    writers = learned_writers(["epoch/2/go"], {3: wrote("epoch/1/go")})
    assert writers == (3,)


def test_number_in_the_key_is_the_rank_that_writes_it() -> None:
    """Ranks 0 and 1 wrote keys with their rank at the second position."""
    written = {rank: wrote(f"ready/0/{rank}", 1) for rank in (0, 1)}
    writers = learned_writers(["ready/1/2", "ready/1/3"], written)
    assert writers == (2, 3)


def test_rank_of_one_writer_may_be_by_chance() -> None:
    """Rank 1 wrote epoch/1/go: that is no rule."""
    assert learned_writers(["epoch/2/go"], {1: wrote("epoch/1/go", 0)}) == ()


def test_number_that_stays_the_same_is_no_evidence_against_the_writer() -> None:
    """Rank 0 wrote pg/0/go/1, and the 0 is not its rank."""
    written = {0: wrote("pg/0/go/1", 0)}
    assert learned_writers(["pg/0/go/2"], written) == (0,)
    assert learned_writers(["pg/1/go/2"], written) == ()


def test_several_writers_without_a_rule_are_not_known() -> None:
    """Any of them may write the next key, and a rank whose writes were not observed."""
    written = {0: wrote("epoch/4/go"), 2: wrote("epoch/5/go")}
    writers = learned_writers(["epoch/6/go"], written)
    assert writers == ()


def test_two_positions_that_disagree_are_no_rule() -> None:
    """Both numbers were the rank so far; in this key they differ."""
    written = {rank: wrote(f"a/{rank}/{rank}", 0, 1) for rank in (1, 2)}
    assert learned_writers(["a/3/3"], written) == (3,)
    assert learned_writers(["a/3/4"], written) == ()


def test_one_unknown_key_makes_all_uncertain() -> None:
    """A call waits for all its keys, and for one of them the writer is unknown."""
    written = {3: wrote("epoch/1/go")}
    writers = learned_writers(["epoch/2/go", "other"], written)
    assert writers == ()


@pytest.mark.parametrize("number", [10**6, 10**18])
def test_number_that_cannot_be_a_rank_names_no_rank(number: int) -> None:
    """A key may have a time in it."""
    written = {rank: wrote(f"ready/{rank}", 0) for rank in (0, 1)}
    assert learned_writers([f"ready/{number}"], written, 16) == ()


def test_nothing_is_learned_from_other_families() -> None:
    """No rank wrote this family."""
    assert learned_writers(["go/1"], {0: wrote("stop/1")}) == ()


def test_ranks_that_write_in_turn() -> None:
    """Rank N % 4 writes epoch/N/go: after 0 to 3 it is the turn of rank 0 again."""
    written = {rank: wrote(f"epoch/{rank}/go", 0) for rank in range(4)}
    assert learned_writers(["epoch/4/go"], written, 4) == (0,)
    later = {rank: wrote(f"epoch/{rank + 4}/go") for rank in (1, 2)}
    assert learned_writers(["epoch/7/go"], later, 4) == (3,)


def test_number_beyond_the_world_is_no_rank() -> None:
    """Keys with the rank of their writer; the job has two."""
    written = {rank: wrote(f"ready/{rank}", 0) for rank in (0, 2)}
    assert learned_writers(["ready/5"], written, 3) == (2,)
    written = {rank: wrote(f"ready/{rank + 4}") for rank in (0, 2)}
    assert learned_writers(["ready/7"], written, 3) == ()
