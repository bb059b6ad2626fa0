// The batch of requests and its table: which slot holds a request's position, what token is expected there.
#ifndef KVCANARY_TABLE_H_
#define KVCANARY_TABLE_H_

#include <cstdint>

#include "host_device.h"
#include "int_array.h"
#include "spec.h"

namespace kvcanary {

KVC_HD int64_t at_least_zero(int64_t value) { return value > 0 ? value : 0; }

// Sum of two non-negative numbers, saturating.
KVC_HD int64_t saturating_add(int64_t a, int64_t b, int64_t top) { return b > top - a ? top : a + b; }

// Positions of one request that a verify checks: every stride-th of [begin, end).
struct RequestSpan {
  int64_t req_pool_idx;
  int64_t prefix;
  int64_t begin;
  int64_t end;
  int64_t stride;
  bool padding;
  uint32_t status;  // 0 or kTableOutOfRange

  KVC_HD int64_t entries() const { return stride == 1 ? end - begin : (end - begin) / stride + ((end - begin) % stride != 0); }
  KVC_HD int64_t position(int64_t entry) const { return begin + entry * stride; }
};

struct RequestBatch {
  IntArray req_pool_indices;  // [bs]
  IntArray prefix_lens;       // [bs]
  IntArray extend_seq_lens;   // [bs], only for plans

  IntArray table;         // rows: [rows, width]; blocks: [rows, blocks]; flat: [n]; identity: nothing
  IntArray table_starts;  // flat: [bs + 1]
  int64_t table_rows = 0;
  int64_t table_width = 0;  // rows: positions; blocks: blocks; identity: positions of a row
  int64_t page_size = 1;    // blocks
  int32_t kind = kTableRows;

  bool has_mapping = false;
  IntArray mapping;

  bool has_expected = false;
  IntArray expected_tokens;  // [expected_rows, expected_width]
  int64_t expected_rows = 0;
  int64_t expected_width = 0;
  IntArray valid_lens;  // [bs]

  int64_t token_offset = 0;
  int64_t window = 0;  // 0: full attention
  int64_t stride = 1;             // a verify visits the positions p with p % stride == step % stride
  const uint32_t* step = nullptr;  // [1], read with a stride above 1
  bool has_padding_req = false;
  int64_t padding_req = 0;

  KVC_HD int64_t size() const { return req_pool_indices.size; }

  KVC_HD bool is_padding(int64_t req_pool_idx) const {
    return req_pool_idx == -1 || (has_padding_req && req_pool_idx == padding_req);
  }

  // Longest prefix that the table can hold for batch row r; -1 where the row itself is out of range.
  KVC_HD int64_t prefix_limit(int64_t r, int64_t req_pool_idx) const {
    if (kind == kTableFlat) {
      const int64_t start = table_starts[r];
      const int64_t stop = table_starts[r + 1] < table.size ? table_starts[r + 1] : table.size;
      return start < 0 || stop < start ? -1 : stop - start;
    }
    if (req_pool_idx < 0 || req_pool_idx >= table_rows) return -1;
    if (kind == kTableBlocks) return table_width * page_size;
    return kind == kTableIdentity ? kInt64Max : table_width;
  }

  KVC_HD RequestSpan span(int64_t r) const {
    RequestSpan s{};
    s.stride = stride;
    s.req_pool_idx = req_pool_indices[r];
    s.padding = is_padding(s.req_pool_idx);
    if (s.padding) return s;
    const int64_t prefix = at_least_zero(prefix_lens[r]);
    if (prefix > prefix_limit(r, s.req_pool_idx)) {
      s.status = kTableOutOfRange;
      return s;
    }
    s.prefix = prefix;
    s.end = prefix;
    s.begin = window > 0 ? at_least_zero(prefix - window) : 0;
    if (kind == kTableIdentity && prefix > table_width) {
      // A ring: the oldest position that is still there has lost its predecessor.
      const int64_t oldest = table_width > 0 ? prefix - table_width + 1 : prefix;
      if (s.begin < oldest) s.begin = oldest;
    }
    if (stride > 1 && s.begin < s.end) {
      int64_t skipped = static_cast<int64_t>(*step) % stride - s.begin % stride;
      if (skipped < 0) skipped += stride;
      s.begin = skipped < s.end - s.begin ? s.begin + skipped : s.end;
    }
    return s;
  }

  // Slot of a position inside the limit, before the index mapping.
  KVC_HD int64_t raw_slot(int64_t r, int64_t req_pool_idx, int64_t position) const {
    switch (kind) {
      case kTableRows:
        return table[req_pool_idx * table_width + position];
      case kTableBlocks: {
        const int64_t block = table[req_pool_idx * table_width + position / page_size];
        return block < 0 || block > kInt32Max ? block : block * page_size + position % page_size;
      }
      case kTableFlat:
        return table[table_starts[r] + position];
      default:
        return table_width > 0 ? req_pool_idx * table_width + position % table_width : kPlanInvalidSlot;
    }
  }

  KVC_HD int64_t map_slot(int64_t slot) const {
    return has_mapping && slot >= 0 ? mapping.get(slot, kPlanInvalidSlot) : slot;
  }

  KVC_HD int64_t slot_at(int64_t r, int64_t req_pool_idx, int64_t position) const {
    return map_slot(raw_slot(r, req_pool_idx, position));
  }

  KVC_HD int64_t prev_slot_at(int64_t r, int64_t req_pool_idx, int64_t position) const {
    return position > 0 ? slot_at(r, req_pool_idx, position - 1) : -1;
  }

  KVC_HD int64_t expected_token(int64_t r, int64_t req_pool_idx, int64_t position) const {
    if (!has_expected || req_pool_idx < 0 || req_pool_idx >= expected_rows) return -1;
    if (position > kInt64Max - at_least_zero(token_offset)) return -1;  // a ring's positions have no bound
    const int64_t column = position + token_offset;
    if (column < 0 || column >= expected_width || column >= valid_lens[r]) return -1;
    return expected_tokens[req_pool_idx * expected_width + column];
  }

  // Tokens that the request writes in this step; a row that is out of range still has them.
  KVC_HD int64_t write_length(int64_t r) const {
    return is_padding(req_pool_indices[r]) ? 0 : at_least_zero(extend_seq_lens[r]);
  }

  KVC_HD int64_t seed_slot(int64_t r, const RequestSpan& s) const {
    if (s.padding || s.status != 0 || s.prefix == 0 || write_length(r) == 0) return -1;
    return slot_at(r, s.req_pool_idx, s.prefix - 1);
  }
};

}  // namespace kvcanary

#endif  // KVCANARY_TABLE_H_
