// What write stamps and asserts for one token, and the rows it reports: the rules, shared by both backends.
#ifndef KVCANARY_WRITE_ENTRY_H_
#define KVCANARY_WRITE_ENTRY_H_

#include <cstdint>

#include "hash.h"
#include "host_device.h"
#include "int_array.h"
#include "record.h"
#include "source.h"
#include "spec.h"
#include "violation.h"

namespace kvcanary {

struct WriteArgs {
  RecordTable records;
  int64_t slots = 0;  // slots that can be written: those of the records, or of the smallest source read
  uint32_t* source_tags = nullptr;  // [slots, sources] or null
  SourceSet sources;
  ViolationLog log;
  LaunchContext context;
  IntArray write_offsets;        // [capacity + 1]
  IntArray seed_slots;           // [capacity]
  const int32_t* num_valid_reqs = nullptr;  // [1]
  IntArray input_ids;            // [tokens]
  IntArray positions;            // [tokens]
  IntArray out_cache_loc;        // [tokens]
  IntArray expected_tokens;      // [tokens] with assert_input
  IntArray expected_positions;   // [tokens] with assert_input
  const int32_t* chain_position_assert = nullptr;  // [1]
  IntArray req_pool_indices;     // at most [capacity]
  IntArray request_ids;          // at most [capacity]
  IntArray namespaces;           // at most [capacity]
  int32_t* verdict = nullptr;    // [capacity]
  int64_t capacity = 0;
  int64_t tokens = 0;
  int64_t padding_slot = 0;
  int32_t launch_tag = 0;
  uint32_t record_flags = 0;
  bool has_padding_slot = false;
  bool assert_input = false;
  bool extended = false;
  bool tolerant = false;  // a seed that was never written says nothing about positions; only with extended
};

// One request's part of the launch.
struct WriteSegment {
  int64_t begin;
  int64_t end;
  uint32_t status;  // kTableOutOfRange where the offsets had to be cut

  KVC_HD bool empty() const { return end <= begin; }
};

KVC_HD int64_t num_requests(const WriteArgs& a) {
  const int64_t n = a.num_valid_reqs[0];
  return n < 0 ? 0 : n > a.capacity ? a.capacity : n;
}

KVC_HD WriteSegment write_segment(const WriteArgs& a, int64_t r) {
  const int64_t begin = a.write_offsets[r];
  const int64_t end = a.write_offsets[r + 1];
  const bool cut = begin < 0 || end > a.tokens || end < begin;
  return {begin < 0 ? 0 : begin, end > a.tokens ? a.tokens : end, cut ? static_cast<uint32_t>(kTableOutOfRange) : 0u};
}

enum class WriteClass { kSkip, kOutOfRange, kStore };

KVC_HD WriteClass classify(const WriteArgs& a, int64_t slot) {
  if (slot == -1) return WriteClass::kSkip;
  if (slot >= 0 && slot < a.slots) return WriteClass::kStore;
  return a.has_padding_slot && slot == a.padding_slot ? WriteClass::kSkip : WriteClass::kOutOfRange;
}

KVC_HD RowOrigin row_origin(const WriteArgs& a, int64_t r) { return {r, a.req_pool_indices.get(r, -1)}; }

KVC_HD Provenance provenance(const WriteArgs& a, int64_t r) {
  return {static_cast<uint64_t>(a.request_ids.get(r, 0)), a.context.step(), a.record_flags,
          static_cast<uint64_t>(a.namespaces.get(r, 0))};
}

// State of a request's chain between two tokens.
struct Chain {
  uint64_t running_hash;
  uint64_t prev_position;
  bool assert_position;
  bool position_known;  // of the token before

  KVC_HD void advance(uint64_t token, uint64_t position) {
    running_hash = mix3(running_hash, token, position);
    prev_position = position;
    position_known = true;
  }
  KVC_HD bool position_is_wrong(uint64_t position) const {
    return assert_position && position_known && position != prev_position + 1;
  }
};

KVC_HD bool seed_is_readable(const WriteArgs& a, int64_t seed) { return seed >= 0 && seed < a.slots; }

KVC_HD bool seed_is_out_of_range(const WriteArgs& a, int64_t seed) { return seed < -1 || seed >= a.slots; }

KVC_HD Chain start_chain(const WriteArgs& a, int64_t r) {
  const int64_t seed = a.seed_slots[r];
  if (!seed_is_readable(a, seed)) return {anchor_hash(static_cast<uint64_t>(a.namespaces.get(r, 0))), 0, false, false};
  const Record record = load_record(a.records, seed);
  return {chain_next(record), record.position, a.chain_position_assert[0] != 0, !(a.tolerant && is_blank(record))};
}

// Reasons of the input assert for token i, without those of its slot.
KVC_HD uint32_t input_reasons(const WriteArgs& a, int64_t i) {
  if (!a.assert_input) return 0;
  return (a.input_ids[i] != a.expected_tokens[i] ? kWriteToken : 0u) | (a.positions[i] != a.expected_positions[i] ? kWritePosition : 0u);
}

// Row of the input assert (and of a slot out of range) for token i of request r.
KVC_HD ViolationRow input_row(const WriteArgs& a, int64_t r, int64_t i, uint32_t reason, uint64_t running_hash, uint64_t real_kv_hash) {
  ViolationRow row = blank_row(a.launch_tag, a.out_cache_loc[i], reason, row_origin(a, r), a.context);
  const int64_t expected_position = a.assert_input ? a.expected_positions[i] : -1;
  set_column(row, kColPosition, a.positions[i]);
  set_column(row, kColToken, a.input_ids[i]);
  set_column(row, kColExpectedToken, a.assert_input ? a.expected_tokens[i] : -1);
  row.column[kColChainHash] = running_hash;
  set_column(row, kColAux, expected_position);
  set_column(row, kColExpectedPosition, expected_position);
  row.column[kColRealKvHash] = real_kv_hash;
  row.column[kColExpectedRealKvHash] = real_kv_hash;
  return row;
}

// Row of the chain position assert for token i of request r.
KVC_HD ViolationRow chain_position_row(const WriteArgs& a, int64_t r, int64_t i, uint64_t running_hash, uint64_t prev_position,
                                       uint64_t real_kv_hash) {
  ViolationRow row = blank_row(a.launch_tag, a.out_cache_loc[i], kWritePosition, row_origin(a, r), a.context);
  set_column(row, kColPosition, a.positions[i]);
  set_column(row, kColToken, a.input_ids[i]);
  set_column(row, kColExpectedToken, a.input_ids[i]);
  row.column[kColChainHash] = running_hash;
  row.column[kColAux] = prev_position + 1;
  row.column[kColExpectedPosition] = prev_position + 1;
  row.column[kColRealKvHash] = real_kv_hash;
  row.column[kColExpectedRealKvHash] = real_kv_hash;
  return row;
}

KVC_HD ViolationRow seed_row(const WriteArgs& a, int64_t r, int64_t seed, uint64_t running_hash) {
  ViolationRow row = blank_row(a.launch_tag, seed, kSlotOutOfRange, row_origin(a, r), a.context);
  row.column[kColChainHash] = running_hash;
  set_column(row, kColAux, -1);
  return row;
}

KVC_HD ViolationRow segment_row(const WriteArgs& a, int64_t r) {
  ViolationRow row = blank_row(a.launch_tag, -1, kTableOutOfRange, row_origin(a, r), a.context);
  set_column(row, kColAux, -1);
  return row;
}

}  // namespace kvcanary

#endif  // KVCANARY_WRITE_ENTRY_H_
