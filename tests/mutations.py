"""Small bugs, each put into a copy of the example engine by one replacement of text, and what a canary may rightly say of it.

No mutated line knows of the canary: these are faults of an engine, not of its integration, but for those that say so.
"""

from __future__ import annotations

import dataclasses

from jax_kvcanary.causes import Cause

BYTES, INPUT, LANDED, MOVED = Cause.BYTES_CHANGED, Cause.WRONG_INPUT, Cause.WRITE_NOT_LANDED, Cause.MOVED
NEVER, OVER, RANGE, SPACE = Cause.NEVER_WRITTEN, Cause.OVERWRITTEN, Cause.OUT_OF_RANGE, Cause.NAMESPACE
STALE, TABLE = Cause.STALE_PAGE, Cause.TABLE_ENTRY
NOT_THERE = (NEVER, STALE)
"""A position that was never written: its slot is empty, or holds what an earlier request left."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """module: of the serving package. old: text that stands there once. truth: what goes wrong. right: causes that are right for it.

    programs: jitted functions that it changes; the others are shared with the engine that is whole. silent: why nothing can be seen,
    if so.
    """

    id: str
    module: str
    old: str
    new: str
    truth: str
    right: tuple[Cause, ...] = ()
    programs: tuple[str, ...] = ()
    silent: str = ""


STEPS = ("mixed", "decode")

MUTATIONS = [
    # ---------------------------------------------------------------------------------- pages and references
    Mutation(
        "frees_too_early",
        "pages",
        "        if self.refcounts[page] == 0:\n            self._to_free(page)",
        "        if self.refcounts[page] <= 1:\n            self._to_free(page)",
        "a page is free while one holder is left, and given out again",
        (OVER,),
    ),
    Mutation(
        "cache_takes_no_reference",
        "prefix_cache",
        "        node.host = None\n        self.allocator.share(page)",
        "        node.host = None",
        "cached pages are freed with the request that wrote them, and given out again",
        (OVER, STALE),
    ),
    Mutation(
        "reader_takes_no_reference",
        "scheduler",
        "        self.allocator.share(node.page)\n        request.pages.append(node.page)",
        "        request.pages.append(node.page)",
        "a cached page is freed under the cache and its other readers",
        (OVER, STALE),
    ),
    Mutation(
        "double_free",
        "scheduler",
        "        for page in request.pages:\n            self.allocator.drop(page)\n        request.pages = []",
        "        for page in [*request.pages, *request.pages[:1]]:\n            self.allocator.drop(page)\n        request.pages = []",
        "the first page of a request is given back twice, and the cache still has it",
        (OVER, STALE),
    ),
    Mutation(
        "fork_shares_one_page_less",
        "scheduler",
        "        for page in child.pages:\n            self.allocator.share(page)",
        "        for page in child.pages[:-1]:\n            self.allocator.share(page)",
        "the last page of a fork has one reference for two holders: both write it, or it is freed under one",
        (OVER,),
    ),
    Mutation(
        "release_not_announced",
        "pages",
        "        self._released.append(page)\n",
        "",
        "the canary never hears of a freed page",
        silent="harmless: an announcement only helps to name causes",
    ),
    Mutation(
        "release_announced_twice",
        "pages",
        "        self._released.append(page)\n",
        "        self._released += [page, page]\n",
        "the canary hears of a freed page twice",
        silent="harmless: a second release changes nothing",
    ),
    Mutation(
        "evicts_what_is_read",
        "prefix_cache",
        "return node.page is not None and (node.locks > 0 or self.allocator.is_shared(node.page))",
        "return False",
        "the cache gives up pages that requests read",
        silent="harmless: the requests' own references keep the pages",
    ),
    Mutation(
        "evicts_and_frees_what_is_read",
        "prefix_cache",
        "        if self._make_host_room():",
        "        while self.allocator.refcounts[victim.page] > 1:\n"
        "            self.allocator.drop(victim.page)\n"
        "        if self._make_host_room():",
        "eviction frees whatever references are left",
        (OVER, STALE),
        silent="harmless: only pages that nobody else holds are evicted",
    ),
    Mutation(
        "evicts_newest_parent_first",
        "prefix_cache",
        "and not self._is_needed(node) and all(child.page is None for child in node.children.values())",
        "and not self._is_needed(node)",
        "a page is evicted before those that continue it",
        silent="harmless: a child's chain goes on from the parent's record wherever it is loaded",
    ),
    Mutation(
        "host_page_dropped_in_use",
        "prefix_cache",
        "leaves = [node for node in hosted if not node.children and not node.locks]",
        "leaves = [node for node in hosted if not node.children]",
        "the host drops a page that an admission is about to load",
        silent="harmless: the admission finds the page gone and computes it; one page of the pool is lost",
    ),
    Mutation(
        "quarantine_stays_cached",
        "scheduler",
        "                self.cache.cut(page)",
        "                pass",
        "pages of the quarantine stay in the cache",
        silent="not reached: without another fault nothing is put in quarantine",
    ),
    # ---------------------------------------------------------------------------------- copy-on-write
    Mutation(
        "forgets_copy_on_write",
        "scheduler",
        "if index >= len(request.pages) or not self.allocator.is_shared(request.pages[index]):",
        "if index >= 0:",
        "a request writes into a page that others share",
        (OVER,),
    ),
    Mutation(
        "copies_wrong_way_round",
        "scheduler",
        "self.copies.append((request.pages[index], page))",
        "self.copies.append((page, request.pages[index]))",
        "an empty page, or what an earlier request left there, is copied over the shared one",
        (OVER, STALE, NEVER, MOVED),
    ),
    Mutation(
        "copy_not_in_batch",
        "scheduler",
        "        self.copies.append((request.pages[index], page))\n",
        "",
        "the request goes on in a page to which nothing was copied",
        (NEVER, STALE, MOVED),
    ),
    Mutation(
        "table_keeps_shared_page",
        "scheduler",
        "        request.pages[index] = page\n        self._set_table(request, index)",
        "        request.pages[index] = page",
        "after a copy the table still names the shared page, and the request writes there",
        (OVER, TABLE),
    ),
    Mutation(
        "source_freed_before_copy",
        "scheduler",
        "self.pinned.append(request.pages[index])",
        "self.allocator.drop(request.pages[index])",
        "the page that is to be copied may be given out in the same step",
        (OVER,),
        silent="harmless: all copies of a step read before any writes, and before the forward pass",
    ),
    Mutation(
        "copies_again_and_again",
        "scheduler",
        "        self.pinned = []\n        self.copies = []",
        "        self.pinned = []\n        self.copies = self.copies[-1:]",
        "the last copy is done again in the steps that follow, over what was written since",
        (OVER,),
    ),
    Mutation(
        "copy_of_preempted_request",
        "scheduler",
        "        self._withdraw_copies(request)\n        if keep:",
        "        if keep:",
        "a copy planned for a request that was preempted is still done, into a page that is free or another's",
        (OVER,),
        silent="not reached in this traffic: no request is preempted in the step that plans a copy for it",
    ),
    Mutation(
        "copy_into_released",
        "scheduler",
        "        self.allocator.forget_release(page)\n        self.copies.append",
        "        self.copies.append",
        "a page is announced as freed in the step that copies into it",
        silent="harmless: releases of a step are applied before its copies",
    ),
    Mutation(
        "copy_skips_a_layer",
        "model",
        'return tuple(layer.at[_nowhere(dst, layer)].set(layer[src], mode="drop") for layer in pool)',
        'return tuple(layer.at[_nowhere(dst, layer)].set(layer[src], mode="drop") for layer in pool[:-1]) + tuple(pool[-1:])',
        "copies leave out the last layer",
        (BYTES,),
        STEPS,
    ),
    Mutation(
        "copy_after_the_step",
        "steps",
        """    pool = copy_pages(pool, batch.copy_src, batch.copy_dst)
    logits, pool, state, verdict, report = guarded_forward(
        statics, params, pool, state, batch, pages=pages, max_extend=batch.input_ids.shape[0]
    )
""",
        """    logits, pool, state, verdict, report = guarded_forward(
        statics, params, pool, state, batch, pages=pages, max_extend=batch.input_ids.shape[0]
    )
    pool = copy_pages(pool, batch.copy_src, batch.copy_dst)
""",
        "pages are copied after the step that reads and writes the copies",
        (BYTES,),
        ("mixed",),
    ),
    # ---------------------------------------------------------------------------------- scheduling
    Mutation(
        "chunk_skips_a_token",
        "scheduler",
        "        request.computed += entry.extend\n",
        "        request.computed += entry.extend + (request.pending > entry.extend)\n",
        "after each chunk that is not the last one position is left out",
        NOT_THERE,
    ),
    Mutation(
        "preemption_keeps_computed",
        "scheduler",
        "        request.pages = []\n        request.computed = 0",
        "        request.pages = []",
        "a preempted request goes on where it was, without the pages it had; what it finds cached is counted twice",
        (*NOT_THERE, INPUT, RANGE),
    ),
    Mutation(
        "fork_one_page_short",
        "scheduler",
        "child.pages = leader.pages[: self._pages_for(upto)]",
        "child.pages = leader.pages[: self._pages_for(upto - 1)]",
        "a fork lacks the page of its last written token if that is the page's first",
        NOT_THERE,
        silent="not reached in this traffic: no fork comes one token after the end of a page",
    ),
    Mutation(
        "decode_without_reserve",
        "scheduler",
        "while steps > 1 and not self._reserve_evicting(",
        "while steps > 1 and False and not self._reserve_evicting(",
        "decode steps run past the pages of a request: the tokens go to the dummy page",
        (*NOT_THERE, TABLE, OVER, RANGE),
    ),
    Mutation(
        "caches_unwritten_page",
        "scheduler",
        "self.cache.insert(request.tokens[: request.computed], request.pages, namespace=request.namespace)",
        "self.cache.insert(request.tokens, request.pages, namespace=request.namespace)",
        "a page is cached whose last token was sampled but never written",
        NOT_THERE,
    ),
    Mutation(
        "stale_table_row",
        "scheduler",
        "            self.req_to_token[request.row] = 0\n",
        "",
        "the table row of a finished request keeps its slots",
        silent="harmless: the next request of the row enters its own before they are read",
    ),
    Mutation(
        "row_given_twice",
        "scheduler",
        "request.row = self.free_rows.pop(0)",
        "request.row = self.free_rows.pop(0) if len(self.free_rows) % 2 else self.free_rows[0]",
        "two requests get the same row of the table",
        (TABLE, OVER, STALE, NEVER, INPUT),
    ),
    Mutation(
        "first_page_not_in_table",
        "scheduler",
        "        for index in range(len(request.pages)):\n            self._set_table(request, index)",
        "        for index in range(1, len(request.pages)):\n            self._set_table(request, index)",
        "the table names the dummy page for the first page that a request takes over",
        (TABLE, NEVER, STALE),
    ),
    Mutation(
        "keeps_row_of_before",
        "scheduler",
        "        for index in range(len(request.pages)):\n            self._set_table(request, index)",
        "        for index in range(len(request.pages)):\n"
        "            if not self.req_to_token[request.row, index * self.config.page_size]:\n"
        "                self._set_table(request, index)",
        "entries that a row has are kept, and finished rows are wiped",
        silent="harmless: a row is wiped when its request ends, so there is nothing to keep",
    ),
    Mutation(
        "wrong_page_in_table",
        "scheduler",
        "= request.pages[index] * size + np.arange(size)",
        "= request.pages[max(index - 1, 0)] * size + np.arange(size)",
        "the table names the page before the right one; the right ones, never written, are cached",
        (TABLE, OVER, *NOT_THERE),
    ),
    # ---------------------------------------------------------------------------------- prefix cache
    Mutation(
        "namespace_not_in_key",
        "prefix_cache",
        "return self.roots.setdefault(namespace, Node((), None))",
        "return self.roots.setdefault(0, Node((), None))",
        "requests of one namespace get cached pages of another",
        (SPACE,),
    ),
    Mutation(
        "partial_match_too_long",
        "scheduler",
        "            request.computed += tokens\n",
        "            request.computed += min(tokens + 1, self.config.page_size, request.pending - 1)\n",
        "one token more than agrees is taken over from a cached page",
        (STALE,),
    ),
    Mutation(
        "matched_pages_reversed",
        "prefix_cache",
        "            nodes.append(child)\n",
        "            nodes.insert(0, child)\n",
        "cached pages are taken over in the wrong order",
        (TABLE, STALE),
    ),
    Mutation(
        "caches_pages_shifted",
        "prefix_cache",
        "zip(self._page_keys(tokens), pages, strict=False)",
        "zip(self._page_keys(tokens), pages[1:], strict=False)",
        "the cache remembers each page under the key of the one before",
        (TABLE, STALE),
    ),
    Mutation(
        "key_of_two_tokens",
        "prefix_cache",
        "            child = node.children.get(key)\n            if child is None:\n                break\n            self._touch(child)",
        "            child = next((node.children[k] for k in node.children if k[:2] == key[:2]), None)\n"
        "            if child is None:\n                break\n            self._touch(child)",
        "a cached page is found by its first two tokens",
        (STALE,),
    ),
    # ---------------------------------------------------------------------------------- host
    Mutation(
        "loads_one_load_late",
        "offload",
        "        self.device.pool = self.steps.put_page(self.device.pool, np.int32(page), host.kv)\n"
        "        return self._import(host, page)",
        "        late, self.late = getattr(self, 'late', None), (host, page)\n"
        "        if late is not None:\n"
        "            self.device.pool = self.steps.put_page(self.device.pool, np.int32(late[1]), late[0].kv)\n"
        "            self._import(*late)\n"
        "        return True",
        "a page comes back from the host only with the load after it, over whatever is there then",
        (NEVER, STALE, OVER),
    ),
    Mutation(
        "bytes_one_load_late",
        "offload",
        "        self.device.pool = self.steps.put_page(self.device.pool, np.int32(page), host.kv)\n",
        "        late, self.late = getattr(self, 'late', None), (host, page)\n"
        "        if late is not None:\n"
        "            self.device.pool = self.steps.put_page(self.device.pool, np.int32(late[1]), late[0].kv)\n",
        "the bytes of a load come with the load after it",
        (BYTES,),
    ),
    Mutation(
        "loads_wrong_host_page",
        "prefix_cache",
        "        if not self.store.load(node.host, page):",
        "        hosts = [other.host for other in self._nodes() if other.host is not None]\n"
        "        if not self.store.load(hosts[0], page):",
        "another page is loaded from the host than the one asked for",
        (STALE,),
    ),
    Mutation(
        "loads_into_wrong_page",
        "offload",
        "self.steps.put_page(self.device.pool, np.int32(page), host.kv)",
        "self.steps.put_page(self.device.pool, np.int32(max(page - 1, 1)), host.kv)",
        "the bytes of a load go to the page before the right one",
        (BYTES,),
    ),
    Mutation(
        "saves_wrong_page",
        "offload",
        "self.steps.take_page(self.device.pool, np.int32(page))",
        "self.steps.take_page(self.device.pool, np.int32(max(page - 1, 0)))",
        "records go to the host with the bytes of another page",
        (BYTES,),
    ),
    Mutation(
        "saves_bytes_without_records",
        "offload",
        "records=self._export(page))",
        "records=None)",
        "the canary's records do not travel with the bytes; the bytes are right",
        (NEVER, STALE, MOVED),
    ),
    Mutation(
        "saves_records_of_other_page",
        "offload",
        "records=self._export(page))",
        "records=self._export(max(page - 1, 1)))",
        "the records of another page travel with the bytes; the bytes are right",
        (BYTES,),
    ),
    Mutation(
        "saves_one_layer_thrice",
        "offload",
        "kv=tuple(np.array(rows) for rows in kv)",
        "kv=tuple(np.array(kv[0]) for rows in kv)",
        "the host has the first layer in the place of all",
        (BYTES,),
    ),
    Mutation(
        "saves_into_shared_buffer",
        "offload",
        "        kv = jax.device_get(self.steps.take_page(self.device.pool, np.int32(page)))\n"
        "        return HostPage(kv=tuple(np.array(rows) for rows in kv)",
        "        kv = jax.device_get(self.steps.take_page(self.device.pool, np.int32(page)))\n"
        "        self.staging = getattr(self, 'staging', None) or tuple(np.array(rows) for rows in kv)\n"
        "        for staged, rows in zip(self.staging, kv):\n"
        "            staged[:] = rows\n"
        "        return HostPage(kv=self.staging",
        "all pages on the host share one buffer, which the next save overwrites",
        (BYTES,),
    ),
    Mutation(
        "load_skips_a_layer",
        "model",
        "return tuple(layer.at[page].set(rows) for layer, rows in zip(pool, kv, strict=True))",
        "return tuple(pool[:1]) + tuple(layer.at[page].set(rows) for layer, rows in zip(pool[1:], kv[1:], strict=True))",
        "loads leave out the first layer",
        (BYTES,),
        ("put_page",),
    ),
    Mutation(
        "load_swaps_k_and_v",
        "model",
        "return tuple(layer.at[page].set(rows) for layer, rows in zip(pool, kv, strict=True))",
        "return tuple(\n"
        "        layer.at[page].set(rows.reshape(rows.shape[0], -1, 2, rows.shape[2])[:, :, ::-1].reshape(rows.shape))\n"
        "        for layer, rows in zip(pool, kv, strict=True)\n"
        "    )",
        "loads exchange K and V",
        (BYTES,),
        ("put_page",),
    ),
    # ---------------------------------------------------------------------------------- batches
    Mutation(
        "pads_slots_with_minus_one",
        "batching",
        "PADDING_SLOT = 0",
        "PADDING_SLOT = -1",
        "the K and V of padding go to the pool's last slot",
        (BYTES, LANDED),
    ),
    Mutation(
        "pads_rows_with_minus_one",
        "batching",
        "PADDING_ROW = 0",
        "PADDING_ROW = -1",
        "padding rows name row -1: decode steps put their tokens, K and V into the first position of the last row",
        (RANGE, INPUT, BYTES, LANDED),
    ),
    Mutation(
        "position_off_by_one",
        "batching",
        "for position in range(entry.request.computed, entry.request.computed + entry.extend)]",
        "for position in range(entry.request.computed + 1, entry.request.computed + entry.extend + 1)]",
        "positions are one too high",
        (INPUT, Cause.SHIFTED),
    ),
    Mutation(
        "token_before",
        "batching",
        "entry.request.tokens[entry.request.computed : entry.request.computed + entry.extend]]",
        "entry.request.tokens[max(entry.request.computed - 1, 0) :][: entry.extend]]",
        "each chunk but the first is fed one token too early",
        (INPUT,),
    ),
    Mutation(
        "slots_off_by_one",
        "batching",
        "for slot in req_to_token[entry.request.row, entry.request.computed : entry.request.computed + entry.extend].tolist()",
        "for slot in (req_to_token[entry.request.row, entry.request.computed : entry.request.computed + entry.extend] + 1).tolist()",
        "each token is written one slot too far",
        (*NOT_THERE, OVER, TABLE, RANGE, Cause.SHIFTED),
    ),
    Mutation(
        "slots_of_other_row",
        "batching",
        "for slot in req_to_token[entry.request.row, entry.request.computed",
        "for slot in req_to_token[entries[0].request.row, entry.request.computed",
        "all requests of a batch write to the slots of the first",
        (*NOT_THERE, OVER, TABLE),
    ),
    Mutation(
        "prefix_lens_of_other_row",
        "batching",
        "prefix_lens=_column(bucket.bs, [entry.request.computed for entry in entries], np.int32)",
        "prefix_lens=_column(bucket.bs, [entry.request.computed for entry in reversed(entries)], np.int32)",
        "prefix lengths are in the wrong order",
        (INPUT, *NOT_THERE, TABLE, RANGE),
    ),
    Mutation(
        "extend_lens_one_short",
        "batching",
        "extend_lens=_column(bucket.bs, [entry.extend for entry in entries], np.int32)",
        "extend_lens=_column(bucket.bs, [max(entry.extend - 1, 1) for entry in entries], np.int32)",
        "the last token of a chunk is not part of it",
        (INPUT, *NOT_THERE),
    ),
    Mutation(
        "shares_column_buffers",
        "batching",
        "    column = np.full(size, padding, dtype)\n    column[: len(values)] = values",
        "    column = _column.__dict__.setdefault((size, np.dtype(dtype)), np.full(size, padding, dtype))\n"
        "    column[: len(values)] = values",
        "columns of one size share a buffer",
        (INPUT, RANGE, TABLE, *NOT_THERE, OVER),
    ),
    Mutation(
        "table_not_copied",
        "batching",
        "req_to_token=req_to_token.copy()",
        "req_to_token=req_to_token",
        "the step may read a table that the scheduler has changed since",
        silent="harmless: the engine waits for each step before it touches the table",
    ),
    Mutation(
        "padded_moves_with_zero",
        "batching",
        "PADDING_MOVE = -1",
        "PADDING_MOVE = 0",
        "padding copies the dummy page to itself",
        silent="harmless: nobody reads the dummy page",
    ),
    Mutation(
        "page_bucket_cuts_last_page",
        "batching",
        "max(-(-(entry.request.computed + entry.extend + plan.num_steps - 1) // config.page_size) for",
        "max(max(1, (entry.request.computed + entry.extend + plan.num_steps - 1) // config.page_size) for",
        "attention does not see the last page",
        silent="read side: what is stored is what the forward pass computed",
    ),
    # ---------------------------------------------------------------------------------- steps
    Mutation(
        "next_slot_is_the_last",
        "steps",
        "return batch.req_to_token.at[batch.req_pool_indices, prefix_lens]",
        "return batch.req_to_token.at[batch.req_pool_indices, prefix_lens - 1]",
        "decode steps after the first write the slot of the token before",
        (*NOT_THERE, OVER, Cause.SHIFTED, TABLE),
        ("decode",),
    ),
    Mutation(
        "stale_out_cache_loc",
        "steps",
        "        out_cache_loc=next_slots(batch, prefix_lens),",
        "        out_cache_loc=batch.out_cache_loc,",
        "all decode steps of a call write the same slot",
        (*NOT_THERE, OVER, Cause.SHIFTED, TABLE),
        ("decode",),
    ),
    Mutation(
        "stale_input_ids",
        "steps",
        "        input_ids=tokens,",
        "        input_ids=batch.input_ids,",
        "decode steps after the first are fed the same token again",
        (INPUT,),
        ("decode",),
    ),
    Mutation(
        "rope_from_chunk_start",
        "model",
        '    tables = rope_tables(config, positions)\n\n    x = params["embedding"][input_ids]\n    written',
        '    tables = rope_tables(config, positions - prefix_lens[owner])\n\n    x = params["embedding"][input_ids]\n    written',
        "RoPE counts from the start of the chunk",
        (),
        ("mixed",),
        silent="before the write: K is computed wrongly, and stored as computed",
    ),
    Mutation(
        "attention_of_other_prefix",
        "model",
        "    query_positions = prefix_lens[:, None] + jnp.arange(max_extend)",
        "    query_positions = jnp.roll(prefix_lens, 1)[:, None] + jnp.arange(max_extend)",
        "attention sees as many positions as the request of another row has",
        (),
        ("mixed",),
        silent="read side: what is stored is what the forward pass computed",
    ),
    Mutation(
        "writes_first_tokens_only",
        "model",
        "return pool_layer.at[out_cache_loc // page_size, out_cache_loc % page_size].set(rows)",
        "return pool_layer.at[(out_cache_loc // page_size)[:16], (out_cache_loc % page_size)[:16]].set(rows[:16])",
        "only the first 16 tokens of a step are written",
        (LANDED,),
        ("mixed",),
    ),
    Mutation(
        "write_skips_a_layer",
        "model",
        "        pool_layer = write_kv(pool_layer, rows, out_cache_loc)",
        "        pool_layer = write_kv(pool_layer, rows, out_cache_loc) if len(written) != 1 else pool_layer",
        "the second layer is not written",
        (LANDED,),
        ("mixed",),
    ),
    Mutation(
        "writes_v_before_k",
        "model",
        "        pool_layer = write_kv(pool_layer, rows, out_cache_loc)",
        "        pool_layer = write_kv(pool_layer, kv_rows(v, k, pool_layer.dtype), out_cache_loc)",
        "K and V change places on their way to the pool",
        (LANDED,),
        ("mixed",),
    ),
]
