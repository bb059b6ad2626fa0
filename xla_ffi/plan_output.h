// The arrays a plan fills.
#ifndef KVCANARY_PLAN_OUTPUT_H_
#define KVCANARY_PLAN_OUTPUT_H_

#include <cstdint>

#include "int_array.h"

namespace kvcanary {

struct PlanOutput {
  IntOutput slot_indices;        // [verify_capacity], as the next four
  IntOutput expected_tokens;
  IntOutput expected_positions;
  IntOutput prev_slot_indices;
  IntOutput batch_rows;
  int32_t* num_valid = nullptr;       // [1]
  int32_t* enable = nullptr;          // [1]
  IntOutput write_offsets;            // [write_req_capacity + 1]
  IntOutput seed_slots;               // [write_req_capacity]
  int32_t* num_valid_reqs = nullptr;  // [1]
  int32_t* row_status = nullptr;      // [bs]
  int64_t* entry_offsets = nullptr;   // [bs + 1], scratch: prefix sums of the rows' entries
  int64_t verify_capacity = 0;
  int64_t write_req_capacity = 0;
};

}  // namespace kvcanary

#endif  // KVCANARY_PLAN_OUTPUT_H_
