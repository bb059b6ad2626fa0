// Arguments of scatter_req_token_ids and its rules, shared by both backends.
#ifndef KVCANARY_SCATTER_ARGS_H_
#define KVCANARY_SCATTER_ARGS_H_

#include <cstdint>

#include "host_device.h"
#include "int_array.h"
#include "spec.h"

namespace kvcanary {

struct ScatterArgs {
  IntArray flat_in;           // [tokens]
  IntArray offsets;           // [bs + 1]
  IntArray req_pool_indices;  // [bs]
  int32_t* pool = nullptr;    // [rows, width]
  int32_t* status = nullptr;  // [bs]
  int64_t rows = 0;
  int64_t width = 0;
};

struct ScatterSegment {
  int64_t row;
  int64_t begin;
  int64_t length;
  int32_t status;
};

KVC_HD ScatterSegment scatter_segment(const ScatterArgs& a, int64_t r) {
  const int64_t row = a.req_pool_indices[r];
  if (row == -1) return {0, 0, 0, 0};
  const int64_t begin = a.offsets[r];
  const int64_t end = a.offsets[r + 1];
  if (row < 0 || row >= a.rows || begin < 0 || end < begin || end > a.flat_in.size) {
    return {0, 0, 0, static_cast<int32_t>(kTableOutOfRange)};
  }
  const int64_t length = end - begin;
  return {row, begin, length < a.width ? length : a.width, 0};
}

// Values wrap to int32.
KVC_HD void scatter_token(const ScatterArgs& a, const ScatterSegment& s, int64_t i) {
  a.pool[s.row * a.width + i] = static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(a.flat_in[s.begin + i])));
}

}  // namespace kvcanary

#endif  // KVCANARY_SCATTER_ARGS_H_
