"""RadixTree: computed prefixes by their tokens, so that a prompt that begins like an earlier one starts from its pages.

An edge is a run of whole pages. A lock on a node protects its pages, and all before it, from eviction; unlocked runs
are evicted from the ends, least recently used first. Each salt has a tree of its own.
"""

import heapq
from array import array
from itertools import count

TOKEN_BYTES = array("i").itemsize
HEAP_SLACK = 64


class PrefixNode:
    """A run of whole pages. `key` is its tokens as bytes: runs are compared by memcmp, not token by token."""

    __slots__ = ("children", "key", "last_used", "lock_count", "pages", "parent", "salt")

    def __init__(self, parent: "PrefixNode | None", key: bytes, pages: list[int], salt: str | None = None) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, PrefixNode] = {}
        self.lock_count = 0
        self.last_used = 0


class RadixTree:
    """Owns the pages of stored prefixes. `page_count` counts them, `evictable_pages` those without a lock."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._page_bytes = page_tokens * TOKEN_BYTES
        self.roots: dict[str | None, PrefixNode] = {}
        self._clock = count(1)
        # Unlocked leaves by last use. An entry whose node was used again, locked or lengthened since is stale.
        self._eviction_queue: list[tuple[int, int, PrefixNode]] = []
        self._node_count = 0
        self.page_count = 0
        self.evictable_pages = 0

    @property
    def eviction_queue_length(self) -> int:
        """Entries in the queue of candidates for eviction, stale ones included."""
        return len(self._eviction_queue)

    def match(self, salt: str | None, tokens: "array[int]") -> tuple[PrefixNode, list[int]]:
        """Return the longest stored prefix of whole pages: its node, locked for the caller, and its pages in order."""
        node = self.roots.get(salt)
        if node is None:
            node = self.roots[salt] = PrefixNode(None, b"", [], salt)
        pages: list[int] = []
        key = tokens[: len(tokens) // self._page_tokens * self._page_tokens].tobytes()
        node, _ = self._follow_key(node, key, pages)
        self._lock_path(node)
        return node, pages

    def insert(self, node: PrefixNode, tokens: "array[int]", pages: list[int]) -> tuple[PrefixNode, int]:
        """Insert a run of whole pages below `node`, which the caller has locked; the lock moves to the run's end.

        Returns the run's last node and how many of `pages` the tree had already. Those remain the caller's; the tree
        owns the rest from now on.
        """
        key = tokens.tobytes()
        end, at = self._follow_key(node, key, [])
        stored_pages = at // self._page_bytes
        if at < len(key):
            leaf = PrefixNode(end, key[at:], pages[stored_pages:])
            end.children[key[at : at + self._page_bytes]] = leaf
            self._node_count += 1
            self.page_count += len(leaf.pages)
            self.evictable_pages += len(leaf.pages)
            end = leaf
        self._lock_path(end)
        self.unlock(node)
        return end, stored_pages

    def has_child(self, node: PrefixNode, first_page: "array[int]") -> bool:
        """Return whether the tree has a run below `node` that begins with this page."""
        return first_page.tobytes() in node.children

    def unlock(self, node: PrefixNode) -> None:
        """Release a lock that `match` or `insert` took."""
        now = next(self._clock)
        leaf = node
        step: PrefixNode | None = node
        while step is not None:
            assert step.lock_count > 0, "a lock is released twice"
            step.lock_count -= 1
            step.last_used = now
            if step.lock_count == 0:
                self.evictable_pages += len(step.pages)
            step = step.parent
        self._queue_if_evictable(leaf)

    def evict(self, max_pages: int) -> list[int]:
        """Remove and return up to `max_pages` unlocked pages, from the least recently used ends on."""
        evicted: list[int] = []
        while len(evicted) < max_pages and self._eviction_queue:
            used, _, node = heapq.heappop(self._eviction_queue)
            if not self._is_evictable(node) or node.last_used != used:
                continue
            parent = node.parent
            assert parent is not None
            remaining_pages = max(0, len(node.pages) - (max_pages - len(evicted)))
            evicted += node.pages[remaining_pages:]
            if remaining_pages:
                del node.pages[remaining_pages:]
                node.key = node.key[: remaining_pages * self._page_bytes]
                self._queue_if_evictable(node)
            else:
                del parent.children[node.key[: self._page_bytes]]
                node.parent = None
                self._node_count -= 1
                self._queue_if_evictable(parent)
        self.page_count -= len(evicted)
        self.evictable_pages -= len(evicted)
        return evicted

    def _follow_key(self, node: PrefixNode, key: bytes, pages: list[int]) -> tuple[PrefixNode, int]:
        """Follow `key` from `node` on and append the passed pages; split a run inside which it leaves the tree."""
        size = self._page_bytes
        at = 0
        while at < len(key):
            child = node.children.get(key[at : at + size])
            if child is None:
                break
            same = self._common_bytes(child.key, key, at)
            if same < len(child.key):
                child = self._split_node(child, same)
            pages += child.pages
            at += same
            node = child
        return node, at

    def _common_bytes(self, run: bytes, key: bytes, at: int) -> int:
        """Return how many bytes of whole pages `run` and `key` from `at` share; their first page is equal."""
        if key.startswith(run, at):
            return len(run)
        low, high = 1, min(len(run), len(key) - at) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(run[: middle * self._page_bytes], at):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _split_node(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a run in two and return the first half. The node becomes the second: locks on it stay at their depth."""
        parent = node.parent
        assert parent is not None
        pages = at // self._page_bytes
        head = PrefixNode(parent, node.key[:at], node.pages[:pages])
        head.lock_count, head.last_used = node.lock_count, node.last_used
        parent.children[head.key[: self._page_bytes]] = head
        self._node_count += 1
        node.parent, node.key = head, node.key[at:]
        del node.pages[:pages]
        head.children[node.key[: self._page_bytes]] = node
        return head

    def _lock_path(self, node: PrefixNode) -> None:
        now = next(self._clock)
        step: PrefixNode | None = node
        while step is not None:
            if step.lock_count == 0:
                self.evictable_pages -= len(step.pages)
            step.lock_count += 1
            step.last_used = now
            step = step.parent

    def _is_evictable(self, node: PrefixNode) -> bool:
        return node.lock_count == 0 and not node.children and node.parent is not None

    def _queue_if_evictable(self, node: PrefixNode) -> None:
        """Queue a node that may have become an unlocked leaf; remove a root without children and locks."""
        if node.parent is None:
            if node.lock_count == 0 and not node.children and self.roots.get(node.salt) is node:
                del self.roots[node.salt]
        elif self._is_evictable(node):
            heapq.heappush(self._eviction_queue, (node.last_used, next(self._clock), node))
            if len(self._eviction_queue) > 2 * self._node_count + HEAP_SLACK:
                self._eviction_queue = [
                    leaf
                    for leaf in self._eviction_queue
                    if self._is_evictable(leaf[2]) and leaf[2].last_used == leaf[0]
                ]
                heapq.heapify(self._eviction_queue)
