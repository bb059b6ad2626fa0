// A violation row and the log that launches report to.
#ifndef KVCANARY_VIOLATION_H_
#define KVCANARY_VIOLATION_H_

#include <cstdint>

#include "host_device.h"
#include "spec.h"

namespace kvcanary {

struct ViolationRow {
  uint64_t column[kRingColumns];
};

// Device-side values that a launch stamps into its rows and records; `values` uint32 [2].
struct LaunchContext {
  const uint32_t* values = nullptr;

  KVC_HD uint32_t step() const { return values[0]; }
  KVC_HD uint32_t shard() const { return values[1]; }
};

struct ViolationLog {
  uint32_t* ring = nullptr;       // [rows, 32]
  int64_t rows = 0;
  int32_t* write_index = nullptr;  // [1]
  uint64_t* slot_runs = nullptr;   // this launch's tag
  uint64_t* kernel_runs = nullptr;
};

// Everything of a row that does not depend on what was found.
struct RowOrigin {
  int64_t batch_row;
  int64_t req_pool_idx;
};

KVC_HD void set_column(ViolationRow& row, Column column, int64_t value) { row.column[column] = static_cast<uint64_t>(value); }

// A row with nothing read and nothing known but its origin.
KVC_HD ViolationRow blank_row(int32_t launch_tag, int64_t slot, uint32_t reason, RowOrigin origin, LaunchContext context) {
  ViolationRow row;
  for (int i = 0; i < kRingColumns; ++i) row.column[i] = 0;
  set_column(row, kColTag, launch_tag);
  set_column(row, kColSlot, slot);
  set_column(row, kColExpectedToken, -1);
  set_column(row, kColReason, reason);
  set_column(row, kColBatchRow, origin.batch_row);
  set_column(row, kColReqPoolIdx, origin.req_pool_idx);
  set_column(row, kColStep, context.step());
  set_column(row, kColExpectedPosition, -1);
  set_column(row, kColFirstBadSource, -1);
  set_column(row, kColShard, context.shard());
  return row;
}

KVC_HD void store_row(const ViolationLog& log, int64_t index, const ViolationRow& row) {
  uint32_t* out = log.ring + index * kRingWords;
  for (int i = 0; i < kRingColumns; ++i) {
    out[2 * i] = static_cast<uint32_t>(row.column[i]);
    out[2 * i + 1] = static_cast<uint32_t>(row.column[i] >> 32);
  }
}

}  // namespace kvcanary

#endif  // KVCANARY_VIOLATION_H_
