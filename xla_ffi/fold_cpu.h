// Hashing a source of several slots at once on the CPU: independent folds, interleaved to hide the latency of each.
#ifndef KVCANARY_FOLD_CPU_H_
#define KVCANARY_FOLD_CPU_H_

#include <cstdint>

#include "source.h"

namespace kvcanary::cpu {

inline constexpr int kFoldGroup = 4;  // folds that one core keeps in flight

// hashes[i] = hash of the source's bytes of slots[i], for i < count <= kFoldGroup.
inline void fold_group(const Source& source, const SourceGeometry& g, const uint32_t* slots, int count, uint64_t* hashes) {
  if (g.piece != 16 || g.read_bytes <= 0 || !is_one_run(g) || count < kFoldGroup) {
    for (int i = 0; i < count; ++i) hashes[i] = fold_source(source, g, slots[i]);
    return;
  }
  const Bytes16* chunks[kFoldGroup];
  uint64_t acc[kFoldGroup] = {};
  for (int i = 0; i < kFoldGroup; ++i) chunks[i] = reinterpret_cast<const Bytes16*>(slot_base(source, g, slots[i]));
  const int64_t length = g.read_bytes / 16;
  for (int64_t c = 0; c < length; ++c) {
    for (int i = 0; i < kFoldGroup; ++i) acc[i] = splitmix64(acc[i] ^ chunks[i][c].low);
    for (int i = 0; i < kFoldGroup; ++i) acc[i] = splitmix64(acc[i] ^ chunks[i][c].high);
  }
  for (int i = 0; i < kFoldGroup; ++i) hashes[i] = acc[i];
}

}  // namespace kvcanary::cpu

#endif  // KVCANARY_FOLD_CPU_H_
