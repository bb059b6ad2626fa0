// A slot's record: four 64-bit words, and four more of provenance in records of 16 words or wider.
#ifndef KVCANARY_RECORD_H_
#define KVCANARY_RECORD_H_

#include <cstdint>

#include "hash.h"
#include "host_device.h"
#include "spec.h"

namespace kvcanary {

struct Record {
  uint64_t token;
  uint64_t position;
  uint64_t prev_hash;
  uint64_t real_kv_hash;
};

struct Provenance {
  uint64_t request_id;
  uint32_t step;
  uint32_t flags;
  uint64_t name_space;
};

struct alignas(16) Words4 {
  uint32_t word[4];
};

// records uint32 [slots, words]; `vector` when every row starts at a multiple of 16 bytes.
struct RecordTable {
  uint32_t* data = nullptr;
  int64_t slots = 0;
  int32_t words = 0;
  bool vector = false;

  KVC_HD bool has_provenance() const { return words >= kProvenanceRecordWords; }
  KVC_HD uint32_t* row(int64_t slot) const { return data + slot * words; }
};

KVC_HD uint64_t join_words(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

KVC_HD void load_words8(const uint32_t* row, bool vector, uint32_t (&out)[8]) {
  if (vector) {
    const Words4 a = reinterpret_cast<const Words4*>(row)[0];
    const Words4 b = reinterpret_cast<const Words4*>(row)[1];
    for (int i = 0; i < 4; ++i) out[i] = a.word[i], out[i + 4] = b.word[i];
  } else {
    for (int i = 0; i < 8; ++i) out[i] = row[i];
  }
}

KVC_HD void store_words8(uint32_t* row, bool vector, const uint32_t (&in)[8]) {
  if (vector) {
    Words4 a, b;
    for (int i = 0; i < 4; ++i) a.word[i] = in[i], b.word[i] = in[i + 4];
    reinterpret_cast<Words4*>(row)[0] = a;
    reinterpret_cast<Words4*>(row)[1] = b;
  } else {
    for (int i = 0; i < 8; ++i) row[i] = in[i];
  }
}

KVC_HD Record load_record(const RecordTable& table, int64_t slot) {
  uint32_t w[8];
  load_words8(table.row(slot), table.vector, w);
  return {join_words(w[0], w[1]), join_words(w[2], w[3]), join_words(w[4], w[5]), join_words(w[6], w[7])};
}

// The record's own words are all zero, whatever its provenance says.
KVC_HD bool is_blank(const Record& record) { return (record.token | record.position | record.prev_hash | record.real_kv_hash) == 0; }

// True while nothing has been stamped on the slot; only then are the provenance words read.
KVC_HD bool is_unwritten(const RecordTable& table, int64_t slot, const Record& record) {
  if (!is_blank(record)) return false;
  if (!table.has_provenance()) return true;
  uint32_t w[8];
  load_words8(table.row(slot) + kRecordWords, table.vector, w);
  uint32_t any = 0;
  for (int i = 0; i < 8; ++i) any |= w[i];
  return any == 0;
}

KVC_HD void store_record(const RecordTable& table, int64_t slot, const Record& r, const Provenance& p) {
  const uint32_t w[8] = {static_cast<uint32_t>(r.token),        static_cast<uint32_t>(r.token >> 32),
                         static_cast<uint32_t>(r.position),     static_cast<uint32_t>(r.position >> 32),
                         static_cast<uint32_t>(r.prev_hash),    static_cast<uint32_t>(r.prev_hash >> 32),
                         static_cast<uint32_t>(r.real_kv_hash), static_cast<uint32_t>(r.real_kv_hash >> 32)};
  store_words8(table.row(slot), table.vector, w);
  if (table.has_provenance()) {
    const uint32_t v[8] = {static_cast<uint32_t>(p.request_id),
                           static_cast<uint32_t>(p.request_id >> 32),
                           p.step,
                           p.flags,
                           static_cast<uint32_t>(p.name_space),
                           static_cast<uint32_t>(p.name_space >> 32),
                           0,
                           0};
    store_words8(table.row(slot) + kRecordWords, table.vector, v);
  }
}

// The hash that the successor of `record` stores.
KVC_HD uint64_t chain_next(const Record& record) { return mix3(record.prev_hash, record.token, record.position); }

}  // namespace kvcanary

#endif  // KVCANARY_RECORD_H_
