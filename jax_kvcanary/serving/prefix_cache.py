"""The prefix cache: a radix tree whose edges are whole pages, with least-recently-used eviction, to host memory if there is any."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jax_kvcanary.serving.offload import HostPage, HostStore
from jax_kvcanary.serving.pages import PageAllocator
from jax_kvcanary.sweep import SweepEntries, entries_of_nodes


@dataclasses.dataclass(eq=False)
class Node:
    """One cached page. ``key``: its tokens. ``page``: where it lies in the pool, or None; then ``host`` has it.

    A node on the host has no child in the pool. ``locks``: admissions in progress that need it to stay.
    """

    key: tuple[int, ...]
    parent: Node | None
    page: int | None = None
    host: HostPage | None = None
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)
    last_used: int = 0
    locks: int = 0

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


@dataclasses.dataclass(frozen=True)
class Match:
    """Cached pages that hold a prefix, and a page in the pool of which the first ``partial_tokens`` tokens continue it."""

    nodes: list[Node]
    partial: Node | None
    partial_tokens: int


class PrefixCache:
    """Holds one reference on every page in the pool that it knows."""

    def __init__(self, allocator: PageAllocator, *, page_size: int, store: HostStore | None = None, host_pages: int = 0) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.store = store
        self.host_pages = host_pages
        self.roots: dict[int, Node] = {}
        self.evictions = 0
        self.offloads = 0
        self.loads = 0
        self._clock = 0
        self._given_up: list[int] = []

    # -------------------------------------------------------------------------------------------- look up and add

    def match(self, tokens: Sequence[int], *, namespace: int) -> Match:
        """The longest cached prefix of ``tokens``."""
        node = self._root(namespace)
        nodes: list[Node] = []
        for key in self._page_keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            self._touch(child)
            nodes.append(child)
            node = child
        partial, count = self._match_partial(node, tokens[len(nodes) * self.page_size :])
        return Match(nodes, partial, count)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], *, namespace: int) -> None:
        """Remember the full pages of a sequence whose K and V are all written."""
        node = self._root(namespace)
        for key, page in zip(self._page_keys(tokens), pages, strict=False):
            if page in self.allocator.quarantined:
                return
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node)
            if child.page is None:
                self._hold(child, page)
            self._touch(child)
            node = child

    def _match_partial(self, node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """The child in the pool that shares most leading tokens with what is left, and how many."""
        best, length = None, 0
        for child in node.children.values():
            common = _common_prefix(child.key, tokens)
            if child.page is not None and common > length:
                best, length = child, common
        if best is not None:
            self._touch(best)
        return best, length

    def _hold(self, node: Node, page: int) -> None:
        node.page = page
        node.host = None
        self.allocator.share(page)

    # -------------------------------------------------------------------------------------------- eviction and load-back

    def evict_one(self) -> bool:
        """Free the page that was not used for longest, of those that nothing else needs; False if there is none."""
        candidates = [node for node in self._nodes() if self._is_evictable(node)]
        if not candidates:
            return False
        victim = min(candidates, key=lambda node: node.last_used)
        self.evictions += 1
        assert victim.page is not None
        if self._make_host_room():
            assert self.store is not None
            victim.host = self.store.save(victim.page)
            self.offloads += 1
            self._drop(victim.page)
            victim.page = None
        else:
            self._remove(victim)
        return True

    def load_back(self, node: Node, page: int) -> bool:
        """Bring a page from the host into a page that the caller allocated and gives away; False if it came back damaged."""
        assert self.store is not None and node.host is not None
        if not self.store.load(node.host, page):
            self._remove(node)
            return False
        self.loads += 1
        node.page = page
        node.host = None
        return True

    def num_evictable(self) -> int:
        """Pages that eviction could free one after the other: those that nothing needs, with nothing needed below them."""
        kept: set[int] = set()  # ids of nodes that eviction cannot reach
        count = 0
        for node in reversed(list(self._nodes())):  # children first
            if any(id(child) in kept for child in node.children.values()) or self._is_needed(node):
                kept.add(id(node))
            else:
                count += node.page is not None
        return count

    def _is_needed(self, node: Node) -> bool:
        """A request holds the page, or an admission is about to."""
        return node.page is not None and (node.locks > 0 or self.allocator.is_shared(node.page))

    def _is_evictable(self, node: Node) -> bool:
        """In the pool, not needed, and no child in the pool."""
        return node.page is not None and not self._is_needed(node) and all(child.page is None for child in node.children.values())

    def _make_host_room(self) -> bool:
        """Whether the host has room for one page more, if need be after the oldest leaf there was dropped."""
        if self.store is None or self.host_pages == 0:
            return False
        hosted = [node for node in self._nodes() if node.host is not None]
        if len(hosted) < self.host_pages:
            return True
        leaves = [node for node in hosted if not node.children and not node.locks]
        if not leaves:
            return False
        self._remove(min(leaves, key=lambda node: node.last_used))
        return True

    # -------------------------------------------------------------------------------------------- sweep

    def entries(self) -> SweepEntries:
        """All slots in the pool as a sweep takes them, each page a node."""
        nodes: list[Node] = []
        namespaces: list[int] = []
        for namespace, root in self.roots.items():
            held = [node for node in root.walk() if node.parent is not None and node.page is not None]
            nodes += held
            namespaces += [namespace] * len(held)
        numbers = {id(node): number for number, node in enumerate(nodes)}
        size = self.page_size
        return entries_of_nodes(
            parents=[numbers.get(id(node.parent), -1) for node in nodes],
            slots=[range(node.page * size, (node.page + 1) * size) for node in nodes if node.page is not None],
            tokens=[node.key for node in nodes],
            namespaces=namespaces,
        )

    def take_given_up(self) -> list[int]:
        """Pages that the tree no longer holds since the last call: a sweep in progress must leave them out."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _drop(self, page: int) -> None:
        self._given_up.append(page)
        self.allocator.drop(page)

    # -------------------------------------------------------------------------------------------- removal

    def cut(self, page: int) -> None:
        """Forget a page and everything that continues it."""
        for node in list(self._nodes()):
            if node.page == page:
                self._remove(node)

    def clear(self) -> None:
        """Forget everything."""
        for root in list(self.roots.values()):
            for node in list(root.children.values()):
                self._remove(node)

    def _remove(self, node: Node) -> None:
        """Take a node and all below it out of the tree."""
        if node.parent is not None:
            node.parent.children.pop(node.key, None)
        for gone in node.walk():
            if gone.page is not None:
                self._drop(gone.page)
            gone.page = None
            gone.host = None

    # -------------------------------------------------------------------------------------------- small things

    def pages(self) -> list[int]:
        """Every page in the pool that the tree holds."""
        return [node.page for node in self._nodes() if node.page is not None]

    def _root(self, namespace: int) -> Node:
        """Sequences of different namespaces never share a page."""
        return self.roots.setdefault(namespace, Node((), None))

    def _nodes(self) -> Iterator[Node]:
        for root in self.roots.values():
            yield from (node for node in root.walk() if node is not root)

    def _page_keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            yield tuple(tokens[start : start + self.page_size])

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def check(self) -> None:
        """Invariants of the tree; a test calls this."""
        for node in self._nodes():
            assert (node.page is None) != (node.host is None), "a page is in exactly one place"
            assert node.locks == 0, "an admission left a lock behind"
            if node.page is None:
                assert all(child.page is None for child in node.children.values()), "a page in the pool under one on the host"
            assert node.page not in self.allocator.quarantined, "a page in quarantine is cached"


def _common_prefix(key: Sequence[int], tokens: Sequence[int]) -> int:
    count = 0
    for a, b in zip(key, tokens, strict=False):
        if a != b:
            break
        count += 1
    return count
