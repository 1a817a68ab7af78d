"""RadixTree: computed prefixes by their tokens, so that a prompt that begins like an earlier one starts from its pages.

An edge is a run of whole pages. A lock on a node keeps its pages, and all before it, from being evicted; what is not
locked is evicted from the ends, least recently used first. Each salt has a tree of its own.
"""

import heapq
from array import array
from itertools import count

TOKEN_BYTES = array("i").itemsize
HEAP_SLACK = 64


class Node:
    """`key` is the run's tokens as bytes: runs are compared by memcmp, not token by token."""

    __slots__ = ("children", "key", "locks", "pages", "parent", "salt", "used")

    def __init__(self, parent: "Node | None", key: bytes, pages: list[int], salt: str | None = None) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0


class RadixTree:
    """Owns the pages it holds. `held` counts them, `evictable` those of them that nobody has locked."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._page_bytes = page_tokens * TOKEN_BYTES
        self.roots: dict[str | None, Node] = {}
        self._clock = count(1)
        # Unlocked leaves by last use. An entry whose node was used again, locked or lengthened since is stale.
        self._leaves: list[tuple[int, int, Node]] = []
        self._nodes = 0
        self.held = 0
        self.evictable = 0

    @property
    def queued(self) -> int:
        """How long the queue of candidates for eviction is."""
        return len(self._leaves)

    def match(self, salt: str | None, tokens: "array[int]") -> tuple[Node, list[int]]:
        """The longest known prefix of whole pages: its node, locked for the caller, and its pages in order."""
        node = self.roots.get(salt)
        if node is None:
            node = self.roots[salt] = Node(None, b"", [], salt)
        pages: list[int] = []
        key = tokens[: len(tokens) // self._page_tokens * self._page_tokens].tobytes()
        node, _ = self._walk(node, key, pages)
        self._lock(node)
        return node, pages

    def insert(self, node: Node, tokens: "array[int]", pages: list[int]) -> tuple[Node, int]:
        """Put a run of whole pages below `node`, which the caller has locked; the lock moves to the run's end.

        Gives the run's last node and how many of `pages` were known already. Those stay the caller's; the rest now are
        the tree's.
        """
        key = tokens.tobytes()
        end, at = self._walk(node, key, [])
        known = at // self._page_bytes
        if at < len(key):
            leaf = Node(end, key[at:], pages[known:])
            end.children[key[at : at + self._page_bytes]] = leaf
            self._nodes += 1
            self.held += len(leaf.pages)
            self.evictable += len(leaf.pages)
            end = leaf
        self._lock(end)
        self.unlock(node)
        return end, known

    def knows(self, node: Node, first_page: "array[int]") -> bool:
        """Whether a run that begins with this page is known below `node`."""
        return first_page.tobytes() in node.children

    def unlock(self, node: Node) -> None:
        """Give back a lock got from `match` or `insert`."""
        now = next(self._clock)
        leaf = node
        step: Node | None = node
        while step is not None:
            assert step.locks > 0, "a lock is given back twice"
            step.locks -= 1
            step.used = now
            if step.locks == 0:
                self.evictable += len(step.pages)
            step = step.parent
        self._offer(leaf)

    def evict(self, wanted: int) -> list[int]:
        """Forget up to `wanted` unlocked pages, from the least recently used ends on, and give them."""
        gone: list[int] = []
        while len(gone) < wanted and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if not self._is_loose(node) or node.used != used:
                continue
            parent = node.parent
            assert parent is not None
            kept = max(0, len(node.pages) - (wanted - len(gone)))
            gone += node.pages[kept:]
            if kept:
                del node.pages[kept:]
                node.key = node.key[: kept * self._page_bytes]
                self._offer(node)
            else:
                del parent.children[node.key[: self._page_bytes]]
                node.parent = None
                self._nodes -= 1
                self._offer(parent)
        self.held -= len(gone)
        self.evictable -= len(gone)
        return gone

    def _walk(self, node: Node, key: bytes, pages: list[int]) -> tuple[Node, int]:
        """Follow `key` from `node` on, adding the pages passed; where it leaves the tree inside a run, split that."""
        size = self._page_bytes
        at = 0
        while at < len(key):
            child = node.children.get(key[at : at + size])
            if child is None:
                break
            same = self._common(child.key, key, at)
            if same < len(child.key):
                child = self._split(child, same)
            pages += child.pages
            at += same
            node = child
        return node, at

    def _common(self, run: bytes, key: bytes, at: int) -> int:
        """How many bytes of whole pages `run` and `key` from `at` share: the first is known to."""
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

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two and give the first half. The node becomes the second: locks on it keep their depth."""
        parent = node.parent
        assert parent is not None
        pages = at // self._page_bytes
        head = Node(parent, node.key[:at], node.pages[:pages])
        head.locks, head.used = node.locks, node.used
        parent.children[head.key[: self._page_bytes]] = head
        self._nodes += 1
        node.parent, node.key = head, node.key[at:]
        del node.pages[:pages]
        head.children[node.key[: self._page_bytes]] = node
        return head

    def _lock(self, node: Node) -> None:
        now = next(self._clock)
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.evictable -= len(step.pages)
            step.locks += 1
            step.used = now
            step = step.parent

    def _is_loose(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        """A node that may have become an unlocked leaf takes its place among them; a root without anything goes."""
        if node.parent is None:
            if node.locks == 0 and not node.children and self.roots.get(node.salt) is node:
                del self.roots[node.salt]
        elif self._is_loose(node):
            heapq.heappush(self._leaves, (node.used, next(self._clock), node))
            if len(self._leaves) > 2 * self._nodes + HEAP_SLACK:
                self._leaves = [leaf for leaf in self._leaves if self._is_loose(leaf[2]) and leaf[2].used == leaf[0]]
                heapq.heapify(self._leaves)
