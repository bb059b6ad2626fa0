// What verify checks of one slot, and the row it reports: the rules, shared by both backends.
#ifndef KVCANARY_VERIFY_ENTRY_H_
#define KVCANARY_VERIFY_ENTRY_H_

#include <cstdint>

#include "hash.h"
#include "host_device.h"
#include "int_array.h"
#include "record.h"
#include "source.h"
#include "spec.h"
#include "violation.h"

namespace kvcanary {

struct VerifyEntry {
  int64_t slot;
  int64_t prev_slot;
  int64_t expected_position;
  int64_t expected_token;
  int64_t batch_row;
};

// Arguments that planned and fused verify share.
struct VerifyArgs {
  RecordTable records;
  int64_t slots = 0;  // slots that can be checked: those of the records, or of the smallest source read
  const uint32_t* source_tags = nullptr;  // [slots, sources] or null
  const int32_t* source_window = nullptr;  // [2]: start, count; only with rotate
  SourceSet sources;
  ViolationLog log;
  LaunchContext context;
  IntArray req_pool_indices;  // [bs]
  IntArray namespaces;        // [bs] or empty
  int32_t* verdict = nullptr;             // [bs]
  int32_t* first_bad_position = nullptr;  // [bs]
  int32_t* unattested = nullptr;                 // [bs]
  int32_t* first_unattested_position = nullptr;  // [bs]
  int64_t batch_size = 0;
  int64_t padding_slot = 0;
  int32_t launch_tag = 0;
  bool has_padding_slot = false;
  bool check_token = false;
  bool extended = false;
  bool tolerant = false;  // slots that were never written are counted, not checked; only with extended
  bool rotate = false;
};

enum class EntryClass { kSkip, kOutOfRange, kCheck };

KVC_HD bool is_padding_slot(const VerifyArgs& a, int64_t slot) { return a.has_padding_slot && slot == a.padding_slot; }

KVC_HD EntryClass classify(const VerifyArgs& a, int64_t slot) {
  if (is_padding_slot(a, slot)) return EntryClass::kSkip;
  return slot < 0 || slot >= a.slots ? EntryClass::kOutOfRange : EntryClass::kCheck;
}

KVC_HD bool known_row(const VerifyArgs& a, int64_t batch_row) { return batch_row >= 0 && batch_row < a.batch_size; }

KVC_HD RowOrigin row_origin(const VerifyArgs& a, int64_t batch_row) {
  return known_row(a, batch_row) ? RowOrigin{batch_row, a.req_pool_indices[batch_row]} : RowOrigin{-1, -1};
}

// What the predecessor says about an entry's chain hash.
struct ChainExpectation {
  uint64_t hash;
  uint32_t reason;  // kSlotOutOfRange or 0
};

KVC_HD bool prev_is_readable(const VerifyArgs& a, int64_t prev_slot) {
  return prev_slot >= 0 && prev_slot < a.slots && !is_padding_slot(a, prev_slot);
}

// Whether a readable predecessor says nothing about its successor. A record of zeros gives 0, hardly another one does: the record is
// read again only there.
KVC_HD bool prev_is_unattested(const VerifyArgs& a, int64_t prev_slot, uint64_t prev_hash) {
  return a.tolerant && prev_hash == 0 && is_blank(load_record(a.records, prev_slot));
}

// `prev_hash`, what the predecessor's record gives, is looked at only where prev_is_readable.
KVC_HD ChainExpectation expect_chain(const VerifyArgs& a, const VerifyEntry& e, const Record& record, uint64_t prev_hash) {
  if (e.prev_slot < 0) {
    const uint64_t name_space = known_row(a, e.batch_row) ? static_cast<uint64_t>(a.namespaces.get(e.batch_row, 0)) : 0;
    return {anchor_hash(name_space), e.prev_slot < -1 ? kSlotOutOfRange : 0u};
  }
  if (prev_is_readable(a, e.prev_slot)) return {prev_is_unattested(a, e.prev_slot, prev_hash) ? record.prev_hash : prev_hash, 0u};
  return {record.prev_hash, is_padding_slot(a, e.prev_slot) ? 0u : static_cast<uint32_t>(kSlotOutOfRange)};
}

// Real-KV side of an entry: hashes for the row and whether they differ.
struct RealKvCheck {
  uint64_t stored;
  uint64_t found;
  int64_t first_bad_source;
  bool bad;
};

// Accumulates the sources of one slot in order.
struct RealKvFold {
  uint64_t combined = 0;
  int64_t first_bad_source = -1;  // lowest source whose tag differs
  uint32_t bad_stored = 0;
  uint32_t bad_found = 0;

  KVC_HD void add(int32_t index, uint64_t hash, const SourceGeometry& g, const uint32_t* tags_row) {
    combined = combine_source(combined, hash, g);
    if (tags_row != nullptr && first_bad_source < 0 && tags_row[index] != source_tag(hash)) {
      first_bad_source = index;
      bad_stored = tags_row[index];
      bad_found = source_tag(hash);
    }
  }
  KVC_HD RealKvCheck against_record(const Record& record) const {
    const bool bad = combined != record.real_kv_hash;
    return {record.real_kv_hash, combined, bad ? first_bad_source : -1, bad};
  }
  KVC_HD RealKvCheck against_tags() const { return {bad_stored, bad_found, first_bad_source, first_bad_source >= 0}; }
};

// Sources of a rotated check, as one interval on a ring of `count` sources.
struct SourceWindow {
  int32_t start;
  int32_t count;
  int32_t total;

  KVC_HD bool contains(int32_t index) const {
    int32_t distance = index - start;
    if (distance < 0) distance += total;
    return distance < count;
  }
};

KVC_HD SourceWindow source_window(const VerifyArgs& a) {
  const int32_t total = a.sources.count;
  if (!a.rotate || total == 0) return {0, total, total};
  int64_t start = static_cast<int64_t>(a.source_window[0]) % total;
  if (start < 0) start += total;
  int64_t count = a.source_window[1];
  count = count < 0 ? 0 : count > total ? total : count;
  return {static_cast<int32_t>(start), static_cast<int32_t>(count), total};
}

KVC_HD uint32_t entry_reasons(const VerifyArgs& a, const VerifyEntry& e, const Record& record, const ChainExpectation& chain,
                              bool real_kv_bad, bool unwritten) {
  uint32_t reason = 0;
  if (record.prev_hash != chain.hash) reason |= kVerifyChainHash;
  if (static_cast<int64_t>(record.position) != e.expected_position) reason |= kVerifyPosition;
  if (real_kv_bad) reason |= kVerifyRealKvHash;
  if (a.check_token && e.expected_token != -1 && static_cast<int64_t>(record.token) != e.expected_token) reason |= kVerifyToken;
  if (a.extended) reason |= chain.reason | (unwritten ? static_cast<uint32_t>(kUnwritten) : 0u);
  return reason;
}

KVC_HD ViolationRow checked_row(const VerifyArgs& a, const VerifyEntry& e, uint32_t reason, const Record& record,
                                const ChainExpectation& chain, const RealKvCheck& real) {
  ViolationRow row = blank_row(a.launch_tag, e.slot, reason, row_origin(a, e.batch_row), a.context);
  row.column[kColPosition] = record.position;
  row.column[kColToken] = record.token;
  set_column(row, kColExpectedToken, a.check_token ? e.expected_token : -1);
  row.column[kColChainHash] = record.prev_hash;
  row.column[kColAux] = chain.hash;
  set_column(row, kColExpectedPosition, e.expected_position);
  row.column[kColRealKvHash] = real.stored;
  row.column[kColExpectedRealKvHash] = real.found;
  set_column(row, kColFirstBadSource, real.first_bad_source);
  return row;
}

KVC_HD ViolationRow out_of_range_row(const VerifyArgs& a, const VerifyEntry& e) {
  ViolationRow row = blank_row(a.launch_tag, e.slot, kSlotOutOfRange, row_origin(a, e.batch_row), a.context);
  set_column(row, kColExpectedToken, a.check_token ? e.expected_token : -1);
  set_column(row, kColExpectedPosition, e.expected_position);
  return row;
}

KVC_HD ViolationRow table_row(const VerifyArgs& a, int64_t batch_row) {
  return blank_row(a.launch_tag, -1, kTableOutOfRange, row_origin(a, batch_row), a.context);
}

KVC_HD int32_t verdict_position(int64_t expected_position) {
  return static_cast<int32_t>(expected_position < 0 ? 0 : expected_position > kInt32Max ? kInt32Max : expected_position);
}

}  // namespace kvcanary

#endif  // KVCANARY_VERIFY_ENTRY_H_
