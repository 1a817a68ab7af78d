"""The page pool: every page is free or somebody's."""

import random

import pytest

from providers.inference.gpt_oss.engine.pages import PagePool


def test_pages_are_neither_lost_nor_made() -> None:
    chance = random.Random(1)
    pool = PagePool(64)
    taken: list[int] = []
    for _ in range(20_000):
        if chance.random() < 0.5:
            taken += pool.take(chance.randint(0, pool.free))
        else:
            chance.shuffle(taken)
            keep = chance.randint(0, len(taken))
            pool.give(taken[keep:])
            del taken[keep:]
        assert len(set(taken)) == len(taken) == pool.count - pool.free


def test_the_page_given_back_last_is_taken_first() -> None:
    pool = PagePool(8)
    first, second = pool.take(2)
    pool.give([first])
    pool.give([second])
    assert pool.take(1) == [second]


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give(pages)
    with pytest.raises(AssertionError, match="is free already"):
        pool.give(pages)


def test_more_pages_than_are_free_cannot_be_taken() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        pool.take(5)
