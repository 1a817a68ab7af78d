"""The prefix tree: it finds what a search through everything would, and forgets the least recently used end first."""

import random
from array import array
from collections.abc import Sequence

import pytest

from providers.inference.gpt_oss.engine.pages import PagePool
from providers.inference.gpt_oss.engine.prefix import PrefixNode, RadixTree
from tests.providers.gpt_oss.driving import check_tree, nodes

Salt = str | None


class Model:
    """A pool, a tree and a plain dict that maps every prefix of whole pages to its page."""

    def __init__(self, page_tokens: int, page_count: int) -> None:
        self.size = page_tokens
        self.pool = PagePool(page_count)
        self.tree = RadixTree(page_tokens)
        self.page_of_prefix: dict[tuple[Salt, tuple[int, ...]], int] = {}
        self.locked: list[PrefixNode] = []

    def longest(self, salt: Salt, tokens: Sequence[int]) -> list[int]:
        pages: list[int] = []
        for end in range(self.size, len(tokens) + 1, self.size):
            page = self.page_of_prefix.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def look_up(self, salt: Salt, tokens: Sequence[int]) -> tuple[PrefixNode, int]:
        node, pages = self.tree.match(salt, array("i", tokens))
        assert pages == self.longest(salt, tokens)
        self.locked.append(node)
        return node, len(pages)

    def compute(self, salt: Salt, tokens: Sequence[int]) -> None:
        """Match, compute the rest and insert it, like a sequence. The lock remains."""
        size = self.size
        whole = len(tokens) // size
        node, start = self.look_up(salt, tokens)
        self.locked.remove(node)
        missing_pages = whole - start
        self.forget(missing_pages - self.pool.free_count)
        if missing_pages > self.pool.free_count:
            self.tree.unlock(node)
            return
        pages = self.pool.allocate(missing_pages)
        assert self.tree.has_child(node, array("i", tokens[start * size : (start + 1) * size])) is False
        node, stored_pages = self.tree.insert(node, array("i", tokens[start * size : whole * size]), pages)
        assert stored_pages == 0
        for index, page in enumerate(pages, start + 1):
            self.page_of_prefix[(salt, tuple(tokens[: index * size]))] = page
        self.locked.append(node)

    def forget(self, max_pages: int) -> list[int]:
        evicted = self.tree.evict(max_pages)
        self.pool.release(evicted)
        self.page_of_prefix = {prefix: page for prefix, page in self.page_of_prefix.items() if page not in set(evicted)}
        return evicted

    def check(self) -> None:
        assert check_tree(self.tree, self.locked) == set(self.page_of_prefix.values())
        assert len(self.page_of_prefix) == self.tree.page_count == self.pool.count - self.pool.free_count


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_finds_the_longest_known_prefix(seed: int) -> None:
    chance = random.Random(seed)
    model = Model(page_tokens=chance.choice([1, 2, 4]), page_count=chance.choice([8, 30, 200]))
    for _ in range(250):
        tokens = [chance.randint(0, 1) for _ in range(chance.randint(0, 24))]
        salt = chance.choice([None, "one", "two"])
        match chance.randint(0, 3):
            case 0:
                model.compute(salt, tokens)
            case 1:
                model.look_up(salt, tokens)
            case 2 if model.locked:
                model.tree.unlock(model.locked.pop(chance.randrange(len(model.locked))))
            case _:
                max_pages, evictable = chance.randint(0, 6), model.tree.evictable_pages
                assert len(model.forget(max_pages)) == min(max_pages, evictable)
        model.check()
    while model.locked:
        model.tree.unlock(model.locked.pop())
    model.forget(10_000)
    assert (model.pool.free_count, model.tree.page_count, model.tree.roots) == (model.pool.count, 0, {})


def run_of(tree: RadixTree, salt: Salt, tokens: Sequence[int], pages: list[int]) -> None:
    """Put a whole prefix into an empty or fitting place and let go of it."""
    node, stored = tree.match(salt, array("i", tokens))
    at = len(stored)
    node, _ = tree.insert(node, array("i", tokens[at:]), pages[at:])
    tree.unlock(node)


def stored_pages_of(tree: RadixTree, salt: Salt, tokens: Sequence[int]) -> list[int]:
    node, pages = tree.match(salt, array("i", tokens))
    tree.unlock(node)
    return pages


def test_the_least_recently_used_end_is_forgotten_first_and_page_by_page() -> None:
    tree = RadixTree(1)
    run_of(tree, None, [1, 2, 3], [10, 11, 12])
    run_of(tree, None, [1, 5, 6], [10, 21, 22])
    stored_pages_of(tree, None, [1, 2, 3])
    assert tree.evict(1) == [22]
    assert stored_pages_of(tree, None, [1, 5, 6]) == [10, 21]
    assert tree.evict(1) == [12]
    assert stored_pages_of(tree, None, [1, 2, 3]) == [10, 11]
    assert tree.evict(9) == [21, 11, 10]
    assert list(nodes(tree)) == []


def test_a_beginning_outlives_its_ends_when_it_was_used_since() -> None:
    tree = RadixTree(1)
    run_of(tree, None, [1, 2], [10, 11])
    run_of(tree, None, [1, 3], [10, 12])
    run_of(tree, None, [9], [90])
    stored_pages_of(tree, None, [1])
    assert tree.evict(2) == [11, 12]
    assert tree.evict(1) == [90]
    assert tree.evict(1) == [10]


def test_salts_share_nothing() -> None:
    tree = RadixTree(2)
    run_of(tree, "a", [1, 2, 3, 4], [0, 1])
    assert stored_pages_of(tree, "b", [1, 2, 3, 4]) == []
    assert stored_pages_of(tree, None, [1, 2, 3, 4]) == []
    assert stored_pages_of(tree, "a", [1, 2, 3, 4, 5]) == [0, 1]


def test_the_second_insert_of_a_run_returns_its_pages() -> None:
    tree = RadixTree(1)
    first, _ = tree.match(None, array("i", [1, 2, 3]))
    second, _ = tree.match(None, array("i", [1, 2, 4]))
    first, stored_count = tree.insert(first, array("i", [1, 2, 3]), [0, 1, 2])
    assert stored_count == 0
    assert tree.has_child(second, array("i", [1]))
    second, stored_count = tree.insert(second, array("i", [1, 2, 4]), [5, 6, 7])
    assert stored_count == 2
    assert check_tree(tree, [first, second]) == {0, 1, 2, 7}


def test_the_eviction_queue_is_no_longer_than_the_tree() -> None:
    tree = RadixTree(1)
    run_of(tree, None, [1, 2, 3], [0, 1, 2])
    for _ in range(10_000):
        stored_pages_of(tree, None, [1, 2, 3])
    assert tree.eviction_queue_length < 100
