"""Ids of records: in the order in which they are made, and never the same."""

from itertools import pairwise

from apis.storage.keys import new_id_key


def test_ids_sort_in_the_order_in_which_they_are_made() -> None:
    keys = [new_id_key() for _ in range(5000)]
    assert all(before < after for before, after in pairwise(keys))
    assert {len(key) for key in keys} == {44}
    assert len({key[16:] for key in keys}) == len(keys)
