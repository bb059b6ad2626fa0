"""Which request does what in the next step: admission, chunking, copy-on-write, preemption, and what follows from a step's results."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import numpy as np

from jax_kvcanary.serving.config import EngineConfig
from jax_kvcanary.serving.pages import DUMMY_PAGE, PageAllocator
from jax_kvcanary.serving.plan import Entry, Request, Status, StepPlan
from jax_kvcanary.serving.prefix_cache import Node, PrefixCache
from jax_kvcanary.serving.sampling import SamplingParams

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the queues, the rows of the token table and, through the allocator and the prefix cache, the pages."""

    def __init__(self, config: EngineConfig, allocator: PageAllocator, cache: PrefixCache) -> None:
        self.config = config
        self.allocator = allocator
        self.cache = cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_rows = list(range(1, config.rows))
        self.req_to_token = np.zeros((config.rows, config.max_context), np.int32)  # slot of each position
        self.token_ids = np.zeros((config.rows, config.max_context), np.int32)  # token of each position
        self.copies: list[tuple[int, int]] = []
        self.pinned: list[int] = []
        self.preemptions = 0
        self.load_failures = 0
        self.released: list[int] = []  # ids of requests that gave their pages back, until the engine asks for them
        self._arrivals = itertools.count()

    # -------------------------------------------------------------------------------------------- requests come and go

    def make_request(self, request_id: int, prompt: Sequence[int], sampling: SamplingParams, namespace: int) -> Request:
        """A checked request, not queued yet."""
        if not prompt:
            raise ValueError("prompt must hold at least one token, got none")
        length = len(prompt) + sampling.max_new_tokens
        if length > self.config.max_context:
            raise ValueError(f"prompt and max_new_tokens must fit max_context={self.config.max_context}, got {length}")
        if self._pages_for(length) > self.config.num_pages - 1:
            raise ValueError(f"a request must fit the pool's {self.config.num_pages - 1} pages, got {self._pages_for(length)}")
        tokens = [int(token) for token in prompt]
        return Request(request_id, list(tokens), sampling, namespace, next(self._arrivals), tokens)

    def enqueue(self, request: Request) -> None:
        """Wait in order of arrival: a request that was preempted comes before younger ones."""
        request.status = Status.WAITING
        self.waiting.append(request)
        self.waiting.sort(key=lambda request: request.arrival)

    def fork(self, leader: Request, child: Request, *, upto: int) -> None:
        """Start a child with the pages that hold the leader's first ``upto`` tokens; without a free row it waits like any other."""
        if leader.status is not Status.RUNNING or not self.free_rows:
            self.enqueue(child)
            return
        child.pages = leader.pages[: self._pages_for(upto)]
        for page in child.pages:
            self.allocator.share(page)
        child.computed = upto
        child.cached_tokens = upto
        self._start(child)

    def cancel(self, request: Request) -> None:
        """End a request between two steps; what it computed stays cached."""
        self._end(request, Status.CANCELLED, "cancelled", keep=True)

    def drop(self, request: Request, reason: str) -> None:
        """End a bad request; none of its pages is cached."""
        self._end(request, Status.DROPPED, reason, keep=False)

    def recompute(self, request: Request) -> None:
        """Send a bad request back to the queue; none of its pages is cached."""
        request.recomputes += 1
        self._release(request, keep=False)
        self.enqueue(request)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Never use these pages again, and forget what the cache has in and after them."""
        for page in pages:
            if page != DUMMY_PAGE and page not in self.allocator.quarantined:
                logger.warning("serving=quarantine page=%d holders=%d", page, self.allocator.refcounts[page])
                self.allocator.quarantine(page)
                self.cache.cut(page)

    # -------------------------------------------------------------------------------------------- the next step

    def schedule(self) -> StepPlan | None:
        """Decide the next step, oldest request first, or None if there is nothing to do."""
        budget = self._prefill_budget()
        entries: list[Entry] = []
        for request in sorted(self.running, key=lambda request: request.arrival):
            extend = self._chunk_length(request, budget)
            if extend == 0 or request.status is not Status.RUNNING or not self._reserve(request, request.computed + extend):
                continue
            if request.pending > 1:
                budget -= extend
            entries.append(Entry(request, extend))
        self._admit(entries, budget)
        if not entries:
            return None
        is_decode = all(entry.request.pending == 1 for entry in entries)
        num_steps = self._num_decode_steps(entries) if is_decode else 1
        return StepPlan(entries=entries, copies=self.copies, num_steps=num_steps, is_decode=is_decode)

    def launched(self) -> None:
        """The step has been dispatched: sources of copies need not stay any longer."""
        for page in self.pinned:
            self.allocator.drop(page)
        self.pinned = []
        self.copies = []

    def _prefill_budget(self) -> int:
        """Tokens that prefill may take in this step; every decoding request needs one of them for itself."""
        return self.config.chunk_size - sum(request.pending == 1 for request in self.running)

    def _chunk_length(self, request: Request, budget: int) -> int:
        return 1 if request.pending == 1 else min(request.pending, budget)

    def _admit(self, entries: list[Entry], budget: int) -> None:
        """Start waiting requests while rows, pages and budget last."""
        while self.waiting and self.free_rows and budget > 0:
            request = self.waiting[0]
            if not self._fits(request):
                if self.running:
                    break
                self._end(request, Status.FAILED, "out of pages", keep=False)
                continue
            self.waiting.pop(0)
            self._attach_prefix(request)
            self._start(request)
            extend = min(request.pending, budget)
            if not self._reserve_evicting(request, request.computed + extend):
                self._retract(request)
                break
            budget -= extend
            entries.append(Entry(request, extend))

    def _fits(self, request: Request) -> bool:
        """Whether the whole request so far and one page more could be held without preempting anybody."""
        needed = self._pages_for(len(request.tokens) + 1)
        return needed <= self.allocator.num_free + self.cache.num_evictable()

    def _num_decode_steps(self, entries: list[Entry]) -> int:
        """How many steps all entries can take without an end in between, and for how many there are pages without preemption."""
        steps = min(self.config.decode_steps, *(entry.request.remaining for entry in entries))
        for entry in entries:
            while steps > 1 and not self._reserve_evicting(entry.request, entry.request.computed + steps):
                steps -= 1
        return steps

    def _start(self, request: Request) -> None:
        """Give a request a row and put what it already has into the tables."""
        request.row = self.free_rows.pop(0)
        request.status = Status.RUNNING
        self.running.append(request)
        self.token_ids[request.row, : len(request.tokens)] = request.tokens
        for index in range(len(request.pages)):
            self._set_table(request, index)

    # -------------------------------------------------------------------------------------------- pages

    def _attach_prefix(self, request: Request) -> None:
        """Take over cached pages; at least one token is left to compute, as its logits are needed."""
        if not self.config.prefix_caching:
            return
        match = self.cache.match(request.tokens[:-1], namespace=request.namespace)
        with _locked([*match.nodes, match.partial]):
            if self._take_nodes(request, match.nodes) and match.partial is not None:
                self._take_partial(request, match.partial, match.partial_tokens)
        request.cached_tokens = request.computed

    def _take_nodes(self, request: Request, nodes: Sequence[Node]) -> bool:
        """Take over whole pages; False if one could not be had, then the prefix ends before it."""
        for node in nodes:
            if not self._take_node(request, node):
                return False
            request.computed += self.config.page_size
        return True

    def _take_partial(self, request: Request, node: Node, tokens: int) -> None:
        """Take over a page of which only the leading tokens are wanted; it is copied before the first write."""
        if self._take_node(request, node):
            request.computed += tokens

    def _take_node(self, request: Request, node: Node) -> bool:
        """Hold a cached page, after it was brought back from the host if need be."""
        if node.page is None and not self._load_back(node):
            return False
        assert node.page is not None
        self.allocator.share(node.page)
        request.pages.append(node.page)
        return True

    def _load_back(self, node: Node) -> bool:
        page = self._allocate_evicting()
        if page is None or node.host is None:
            return False
        self.allocator.forget_release(page)
        if self.cache.load_back(node, page):
            return True
        self.load_failures += 1
        logger.warning("serving=load_back_failed page=%d", page)
        self.allocator.drop(page)
        return False

    def _reserve(self, request: Request, end: int) -> bool:
        """Make the positions up to ``end`` writable, at the cost of younger requests; False if the request itself had to go."""
        while not self._reserve_evicting(request, end):
            victim = self._youngest()
            if len(self.running) == 1:
                self._end(request, Status.FAILED, "out of pages", keep=False)
                return False
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _reserve_evicting(self, request: Request, end: int) -> bool:
        """Make the positions up to ``end`` writable, at the cost of idle cached pages."""
        if not self._own_written_page(request):
            return False
        while len(request.pages) * self.config.page_size < end:
            page = self._allocate_evicting()
            if page is None:
                return False
            request.pages.append(page)
            self._set_table(request, len(request.pages) - 1)
        return True

    def _own_written_page(self, request: Request) -> bool:
        """Copy-on-write: the page of the next token may be held by others too; then the request goes on in a copy."""
        index = request.computed // self.config.page_size
        if index >= len(request.pages) or not self.allocator.is_shared(request.pages[index]):
            return True
        page = self._allocate_evicting()
        if page is None:
            return False
        self.allocator.forget_release(page)
        self.copies.append((request.pages[index], page))
        self.pinned.append(request.pages[index])  # its reference is kept until the copy has been launched
        request.pages[index] = page
        self._set_table(request, index)
        return True

    def _withdraw_copies(self, request: Request) -> None:
        """Copies planned for a request that does not take part after all."""
        for copy in [copy for copy in self.copies if copy[1] in request.pages]:
            self.copies.remove(copy)
            self.pinned.remove(copy[0])
            self.allocator.drop(copy[0])

    def _allocate_evicting(self) -> int | None:
        """A free page, if need be one that the cache gives up."""
        page = self.allocator.allocate()
        while page is None and self.cache.evict_one():
            page = self.allocator.allocate()
        return page

    def _set_table(self, request: Request, index: int) -> None:
        """Enter the slots of a request's page into its row."""
        size = self.config.page_size
        self.req_to_token[request.row, index * size : (index + 1) * size] = request.pages[index] * size + np.arange(size)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    # -------------------------------------------------------------------------------------------- preemption and release

    def _youngest(self) -> Request:
        return max(self.running, key=lambda request: request.arrival)

    def _retract(self, request: Request) -> None:
        """Preempt: the request goes back to the queue, and what it computed stays cached until somebody needs the pages."""
        self.preemptions += 1
        request.preemptions += 1
        self._release(request, keep=True)
        self.enqueue(request)

    def _end(self, request: Request, status: Status, reason: str, *, keep: bool) -> None:
        self._release(request, keep=keep)
        request.status = status
        request.finish_reason = reason
        for sibling in request.siblings:
            if not sibling.is_done:
                self.enqueue(sibling)
        request.siblings = []

    def _release(self, request: Request, *, keep: bool) -> None:
        """Give back everything a request holds."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        self._withdraw_copies(request)
        if keep:
            self._cache_pages(request)
        for page in request.pages:
            self.allocator.drop(page)
        request.pages = []
        request.computed = 0
        self.released.append(request.request_id)
        self._free_row(request)

    def _free_row(self, request: Request) -> None:
        if request.row:
            self.req_to_token[request.row] = 0
            self.token_ids[request.row] = 0
            self.free_rows.append(request.row)
            request.row = 0

    def _cache_pages(self, request: Request) -> None:
        """Offer the full pages of a request to the prefix cache."""
        if self.config.prefix_caching:
            self.cache.insert(request.tokens[: request.computed], request.pages, namespace=request.namespace)

    def take_released(self) -> list[int]:
        """Requests that gave their pages back since the last call."""
        released, self.released = self.released, []
        return released

    # -------------------------------------------------------------------------------------------- results

    def commit(self, entry: Entry, sampled: Sequence[int]) -> list[int]:
        """Take over a step's results for one entry: one sampled token a decode step. Returns the tokens that count."""
        request = entry.request
        prompt_was_open = request.computed < len(request.prompt)
        request.computed += entry.extend
        if request.pending > 0:  # a chunk that is not the last: its sample means nothing
            self._cache_pages(request)
            return []
        accepted: list[int] = []
        for token in sampled:
            if accepted:
                request.computed += 1
            self._append(request, int(token))
            accepted.append(int(token))
            if self._is_last(request, int(token)):
                break
        if prompt_was_open:
            self._cache_pages(request)
            self._fork_siblings(request)
        if self._is_last(request, accepted[-1]):
            reason = "stop" if accepted[-1] in self.config.eos_token_ids else "length"
            self._end(request, Status.FINISHED, reason, keep=True)
        return accepted

    def _append(self, request: Request, token: int) -> None:
        if len(request.tokens) < self.config.max_context:
            self.token_ids[request.row, len(request.tokens)] = token
        request.tokens.append(token)

    def _is_last(self, request: Request, token: int) -> bool:
        return token in self.config.eos_token_ids or request.remaining <= 0

    def _fork_siblings(self, leader: Request) -> None:
        """Parallel samples start from the prompt's last token, which each computes anew to draw from its logits."""
        for sibling in leader.siblings:
            if not sibling.is_done:
                self.fork(leader, sibling, upto=len(leader.prompt) - 1)
        leader.siblings = []

    # -------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """Invariants between two steps; a test calls this."""
        held: dict[int, int] = {}
        for page in itertools.chain(self.pinned, self.cache.pages(), *(request.pages for request in [*self.running, *self.waiting])):
            held[page] = held.get(page, 0) + 1
        self.allocator.check(held)
        self.cache.check()
        rows = [request.row for request in self.running]
        assert sorted([*rows, *self.free_rows]) == list(range(1, self.config.rows)), "a row is free and used, or lost"
        for request in self.running:
            assert len(request.pages) * self.config.page_size >= request.computed, "a written position has no page"
            for index, page in enumerate(request.pages):
                assert self.req_to_token[request.row, index * self.config.page_size] == page * self.config.page_size
            assert self.token_ids[request.row, : len(request.tokens)].tolist() == request.tokens[: self.config.max_context]


class _locked:
    """Keeps nodes of the cache from being evicted or dropped."""

    def __init__(self, nodes: Iterable[Node | None]) -> None:
        self.nodes = [node for node in nodes if node is not None]

    def __enter__(self) -> None:
        for node in self.nodes:
            node.locks += 1

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.locks -= 1
