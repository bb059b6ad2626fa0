// Entry points of the CPU kernels: raw pointers and plain numbers, no XLA, no Python.
#ifndef KVCANARY_KERNELS_CPU_H_
#define KVCANARY_KERNELS_CPU_H_

#include "executor.h"
#include "int_array.h"
#include "plan_output.h"
#include "scatter_args.h"
#include "table.h"
#include "verify_entry.h"
#include "write_entry.h"

namespace kvcanary::cpu {

void plan(const RequestBatch& batch, const PlanOutput& out, Executor& executor);

// The entries of a planned verify.
struct PlannedEntries {
  IntArray slot_indices;  // [capacity], as the next three
  IntArray expected_tokens;
  IntArray expected_positions;
  IntArray prev_slot_indices;
  IntArray batch_rows;  // [capacity] or empty
  const int32_t* num_valid = nullptr;
  const int32_t* enable = nullptr;
  const int32_t* row_status = nullptr;  // [bs]
};

void verify(const VerifyArgs& args, const PlannedEntries& entries, Executor& executor);
void verify_fused(const VerifyArgs& args, const RequestBatch& batch, Executor& executor);
void write(const WriteArgs& args, Executor& executor);
void scatter(const ScatterArgs& args, Executor& executor);

}  // namespace kvcanary::cpu

#endif  // KVCANARY_KERNELS_CPU_H_
