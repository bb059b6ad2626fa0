// Where a slot's real KV bytes are, and their hash.
#ifndef KVCANARY_SOURCE_H_
#define KVCANARY_SOURCE_H_

#include <cstdint>
#include <cstring>

#include "hash.h"
#include "host_device.h"

namespace kvcanary {

inline constexpr int kRunLevels = 4;

// Byte geometry of a source. Slot s is page s / page_size, place s % page_size; its bytes are runs of `run_bytes`, counted by
// four nested loops in row-major order. `read_bytes` of them, in the launch's mode, are hashed.
struct SourceGeometry {
  int64_t page_stride;
  int64_t token_stride;
  int64_t run_strides[kRunLevels];
  int64_t run_bytes;
  int64_t read_bytes;
  int32_t run_counts[kRunLevels];
  uint32_t page_size;
  int32_t piece;  // bytes that can be loaded at once (1, 2, 4, 8, 16): divides every address, run and length

  KVC_HD bool operator==(const SourceGeometry& other) const {
    bool same = page_stride == other.page_stride && token_stride == other.token_stride && run_bytes == other.run_bytes &&
                read_bytes == other.read_bytes && page_size == other.page_size && piece == other.piece;
    for (int level = 0; level < kRunLevels; ++level) {
      same = same && run_strides[level] == other.run_strides[level] && run_counts[level] == other.run_counts[level];
    }
    return same;
  }
};

struct Source {
  const unsigned char* base;
  int64_t geometry;  // index into SourceSet::geometries
};

// All sources of a launch; the arrays live on the side that reads them.
struct SourceSet {
  const Source* sources = nullptr;
  const SourceGeometry* geometries = nullptr;
  int32_t count = 0;
};

KVC_HD const unsigned char* slot_base(const Source& source, const SourceGeometry& g, uint32_t slot) {
  uint32_t page = 0;
  if ((g.page_size & (g.page_size - 1)) == 0) {
#ifdef __CUDA_ARCH__
    page = slot >> (31 - __clz(static_cast<int>(g.page_size)));
#else
    page = slot >> (31 - __builtin_clz(g.page_size));
#endif
  } else {
    page = slot / g.page_size;
  }
  const uint32_t place = slot - page * g.page_size;
  return source.base + static_cast<int64_t>(page) * g.page_stride + static_cast<int64_t>(place) * g.token_stride;
}

KVC_HD bool is_one_run(const SourceGeometry& g) { return g.read_bytes <= g.run_bytes; }

// The runs of a slot, one after the other.
class RunCursor {
 public:
  KVC_HD RunCursor(const unsigned char* start, const SourceGeometry& g) : start_(start), run_(start), g_(g) {
    for (int level = 0; level < kRunLevels; ++level) index_[level] = 0;
  }
  KVC_HD const unsigned char* run() const { return run_; }
  KVC_HD void next() {
    for (int level = kRunLevels - 1; level >= 0; --level) {
      if (++index_[level] < g_.run_counts[level]) break;
      index_[level] = 0;
    }
    run_ = start_;
    for (int level = 0; level < kRunLevels; ++level) run_ += index_[level] * g_.run_strides[level];
  }

 private:
  const unsigned char* start_;
  const unsigned char* run_;
  const SourceGeometry& g_;
  int64_t index_[kRunLevels];
};

// 8-byte words of a slot in any geometry. Pieces are aligned to their size and never straddle a run.
class WordReader {
 public:
  KVC_HD WordReader(const unsigned char* start, const SourceGeometry& g) : cursor_(start, g), g_(g), left_(g.read_bytes) {}

  // The next word, padded with zeros past the end.
  KVC_HD uint64_t next_word() {
    uint64_t word = 0;
    for (int filled = 0; filled < 8 && left_ > 0; filled += g_.piece) {
      word |= load_piece(cursor_.run() + offset_) << (8 * filled);
      left_ -= g_.piece;
      offset_ += g_.piece;
      if (offset_ == g_.run_bytes) {
        offset_ = 0;
        cursor_.next();
      }
    }
    return word;
  }
  KVC_HD bool done() const { return left_ <= 0; }

 private:
  KVC_HD uint64_t load_piece(const unsigned char* p) const {
    switch (g_.piece) {
      case 8:
        return *reinterpret_cast<const uint64_t*>(p);
      case 4:
        return *reinterpret_cast<const uint32_t*>(p);
      case 2:
        return *reinterpret_cast<const uint16_t*>(p);
      default:
        return *p;
    }
  }

  RunCursor cursor_;
  const SourceGeometry& g_;
  int64_t left_;
  int64_t offset_ = 0;
};

struct alignas(16) Bytes16 {
  uint64_t low, high;
};

KVC_HD uint64_t fold_chunks(uint64_t acc, const unsigned char* start, int64_t bytes) {
  const Bytes16* chunks = reinterpret_cast<const Bytes16*>(start);
  for (int64_t i = 0; i < bytes / 16; ++i) {
    const Bytes16 chunk = chunks[i];
    acc = splitmix64(acc ^ chunk.low);
    acc = splitmix64(acc ^ chunk.high);
  }
  return acc;
}

// Hash of one source's bytes of a slot (0 if it reads none).
KVC_HD uint64_t fold_source(const Source& source, const SourceGeometry& g, uint32_t slot) {
  // A source that reads nothing does not bound the slots either: its geometry may not reach this one.
  if (g.read_bytes <= 0) return 0;
  const unsigned char* start = slot_base(source, g, slot);
  uint64_t acc = 0;
  if (g.piece == 16) {
    if (is_one_run(g)) return fold_chunks(acc, start, g.read_bytes);
    RunCursor cursor(start, g);
    for (int64_t left = g.read_bytes; left > 0; left -= g.run_bytes) {
      acc = fold_chunks(acc, cursor.run(), left < g.run_bytes ? left : g.run_bytes);
      cursor.next();
    }
    return acc;
  }
  for (WordReader reader(start, g); !reader.done();) acc = splitmix64(acc ^ reader.next_word());
  return acc;
}

// What a source tag keeps of a source's hash.
KVC_HD uint32_t source_tag(uint64_t source_hash) { return static_cast<uint32_t>(source_hash); }

// The combination step over sources; a source that reads nothing is left out.
KVC_HD uint64_t combine_source(uint64_t acc, uint64_t source_hash, const SourceGeometry& g) {
  return g.read_bytes > 0 ? splitmix64(acc ^ source_hash) : acc;
}

}  // namespace kvcanary

#endif  // KVCANARY_SOURCE_H_
