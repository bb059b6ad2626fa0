// write on the CPU: real-KV hashes of all tokens in parallel, then the chains in request order.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "fold_cpu.h"
#include "kernels_cpu.h"
#include "log_cpu.h"

namespace kvcanary::cpu {
namespace {

int64_t tokens_per_chunk(const WriteArgs& args) {
  int64_t bytes = 64;
  for (int32_t i = 0; i < args.sources.count; ++i) bytes += args.sources.geometries[args.sources.sources[i].geometry].read_bytes;
  return std::clamp<int64_t>((int64_t{1} << 17) / bytes, 4, 4096);
}

// Real-KV hash (and source tags) of every token's slot that can be written.
struct TokenHashes {
  std::vector<uint64_t> combined;  // [tokens]
  std::vector<uint32_t> tags;      // [tokens, sources]
};

// Hashes the slots of up to kFoldGroup tokens.
void hash_group(const WriteArgs& args, const int64_t* tokens, const uint32_t* slots, int count, TokenHashes& hashes) {
  const int32_t sources = args.sources.count;
  uint64_t combined[kFoldGroup] = {};
  for (int32_t k = 0; k < sources; ++k) {
    const Source& source = args.sources.sources[k];
    const SourceGeometry& g = args.sources.geometries[source.geometry];
    uint64_t folded[kFoldGroup];
    fold_group(source, g, slots, count, folded);
    for (int i = 0; i < count; ++i) {
      combined[i] = combine_source(combined[i], folded[i], g);
      if (args.source_tags != nullptr) hashes.tags[static_cast<size_t>(tokens[i] * sources + k)] = source_tag(folded[i]);
    }
  }
  for (int i = 0; i < count; ++i) hashes.combined[static_cast<size_t>(tokens[i])] = combined[i];
}

TokenHashes hash_tokens(const WriteArgs& args, Executor& executor) {
  TokenHashes hashes;
  hashes.combined.assign(static_cast<size_t>(args.tokens), 0);
  const int32_t sources = args.sources.count;
  if (args.source_tags != nullptr) hashes.tags.assign(static_cast<size_t>(args.tokens) * sources, 0);
  if (sources == 0) return hashes;
  const int64_t per_chunk = tokens_per_chunk(args);
  executor.run((args.tokens + per_chunk - 1) / per_chunk, [&](int64_t chunk) {
    const int64_t last = std::min(args.tokens, (chunk + 1) * per_chunk);
    int64_t tokens[kFoldGroup];
    uint32_t slots[kFoldGroup];
    int count = 0;
    for (int64_t i = chunk * per_chunk; i < last; ++i) {
      const int64_t slot = args.out_cache_loc[i];
      if (classify(args, slot) != WriteClass::kStore) continue;
      tokens[count] = i;
      slots[count++] = static_cast<uint32_t>(slot);
      if (count < kFoldGroup) continue;
      hash_group(args, tokens, slots, count, hashes);
      count = 0;
    }
    hash_group(args, tokens, slots, count, hashes);
  });
  return hashes;
}

// Stamps one request; returns how many entries were stored.
uint64_t write_request(const WriteArgs& args, int64_t r, const WriteSegment& segment, const TokenHashes& hashes, RowCollector& rows) {
  Chain chain = start_chain(args, r);
  const int64_t seed = args.seed_slots[r];
  if (args.extended && seed_is_out_of_range(args, seed)) rows.add(seed_row(args, r, seed, chain.running_hash));
  const Provenance stamp = provenance(args, r);
  uint64_t stored = 0;
  for (int64_t i = segment.begin; i < segment.end; ++i) {
    const int64_t slot = args.out_cache_loc[i];
    const WriteClass kind = classify(args, slot);
    if (kind == WriteClass::kSkip) continue;
    const uint32_t reasons = input_reasons(args, i);
    if (kind == WriteClass::kOutOfRange) {
      if (args.extended) rows.add(input_row(args, r, i, reasons | kSlotOutOfRange, chain.running_hash, 0));
      continue;
    }
    const uint64_t real_kv_hash = hashes.combined[static_cast<size_t>(i)];
    const uint64_t token = static_cast<uint64_t>(args.input_ids[i]);
    const uint64_t position = static_cast<uint64_t>(args.positions[i]);
    if (reasons != 0) rows.add(input_row(args, r, i, reasons, chain.running_hash, real_kv_hash));
    if (chain.position_is_wrong(position)) {
      rows.add(chain_position_row(args, r, i, chain.running_hash, chain.prev_position, real_kv_hash));
    }
    store_record(args.records, slot, {token, position, chain.running_hash, real_kv_hash}, stamp);
    if (args.source_tags != nullptr) {
      std::copy_n(hashes.tags.begin() + i * args.sources.count, args.sources.count, args.source_tags + slot * args.sources.count);
    }
    chain.advance(token, position);
    ++stored;
  }
  return stored;
}

}  // namespace

void write(const WriteArgs& args, Executor& executor) {
  ++*args.log.kernel_runs;
  normalize_index(args.log);
  std::fill_n(args.verdict, args.capacity, static_cast<int32_t>(kNotChecked));
  const int64_t requests = num_requests(args);
  if (requests == 0) return;
  const TokenHashes hashes = hash_tokens(args, executor);
  for (int64_t r = 0; r < requests; ++r) {
    RowCollector rows(log_room(args.log));
    const WriteSegment segment = write_segment(args, r);
    if (args.extended && segment.status != 0) rows.add(segment_row(args, r));
    const uint64_t stored = segment.empty() ? 0 : write_request(args, r, segment, hashes, rows);
    *args.log.slot_runs += stored;
    args.verdict[r] = rows.count() > 0 ? kBad : stored > 0 ? kOk : kNotChecked;
    append_rows(args.log, rows);
  }
}

}  // namespace kvcanary::cpu
