"""The page pool: every page is free or has one owner."""

import random

import pytest

from providers.inference.gpt_oss.engine.pages import PagePool


def test_pages_are_conserved() -> None:
    chance = random.Random(1)
    pool = PagePool(64)
    taken: list[int] = []
    for _ in range(20_000):
        if chance.random() < 0.5:
            taken += pool.allocate(chance.randint(0, pool.free_count))
        else:
            chance.shuffle(taken)
            keep = chance.randint(0, len(taken))
            pool.release(taken[keep:])
            del taken[keep:]
        assert len(set(taken)) == len(taken) == pool.count - pool.free_count


def test_the_page_given_back_last_is_taken_first() -> None:
    pool = PagePool(8)
    first, second = pool.allocate(2)
    pool.release([first])
    pool.release([second])
    assert pool.allocate(1) == [second]


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="is free already"):
        pool.release(pages)


def test_more_pages_than_are_free_cannot_be_taken() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        pool.allocate(5)
