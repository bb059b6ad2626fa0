// What one test case is: every operand of one launch as plain host data, before any backend has it.
#ifndef KVCANARY_TESTS_CASE_H_
#define KVCANARY_TESTS_CASE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "spec.h"

namespace kvtest {

// An integer operand; `shift` bytes lie between a multiple of 16 and its first element.
struct Ints {
  std::vector<int64_t> values;
  bool wide = false;
  int shift = 0;

  int64_t size() const { return static_cast<int64_t>(values.size()); }
  int64_t at(int64_t i) const { return values.at(static_cast<size_t>(i)); }
  int64_t get(int64_t i, int64_t fallback) const { return i >= 0 && i < size() ? at(i) : fallback; }
};

struct Words {
  std::vector<uint32_t> values;
  int shift = 0;
};

struct Bytes {
  std::vector<unsigned char> values;
  int shift = 0;
};

// The static description of a source, all in bytes.
struct SourceSpec {
  int64_t buffer = 0;
  int64_t offset = 0;
  int64_t pages = 0;
  int64_t page_size = 1;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  std::array<int64_t, 4> counts{1, 1, 1, 1};
  std::array<int64_t, 4> strides{0, 0, 0, 0};
  int64_t run_bytes = 1;
  int64_t read_bytes = 0;
};

struct Sources {
  std::vector<Bytes> buffers;
  std::vector<SourceSpec> specs;
  int32_t mode = kvcanary::kModeNone;
  int32_t max_piece = 16;  // kernels may be told of smaller pieces than the geometry allows
};

// Records, tags and log.
struct State {
  int64_t slots = 0;
  int32_t words = kvcanary::kRecordWords;
  Words records;  // [slots, words]
  bool has_tags = false;
  Words tags;  // [slots, sources]
  int64_t ring_rows = 0;
  Words ring;  // [ring_rows, 32]
  int32_t write_index = 0;
  std::array<uint64_t, kvcanary::kNumLaunchTags> slot_runs{};
  std::array<uint64_t, kvcanary::kNumLaunchTags> kernel_runs{};
};

// The batch of requests that plan and the fused verify read.
struct Batch {
  Ints req_pool_indices;
  Ints prefix_lens;
  Ints extend_seq_lens;
  int32_t kind = kvcanary::kTableRows;
  Ints table;
  Ints table_starts;
  int64_t table_rows = 0;
  int64_t table_width = 0;
  int64_t page_size = 1;
  bool has_mapping = false;
  Ints mapping;
  bool has_expected = false;
  Ints expected_tokens;
  int64_t expected_rows = 0;
  int64_t expected_width = 0;
  Ints valid_lens;
  int64_t window = 0;
  int64_t stride = 1;  // of a fused verify; its step is the launch's
  int64_t token_offset = 0;
  bool has_padding_req = false;
  int64_t padding_req = 0;

  int64_t size() const { return req_pool_indices.size(); }
};

struct PlanShape {
  int64_t verify_capacity = 0;
  int64_t write_req_capacity = 0;
  bool wide = false;
};

// The operands of a planned verify that a plan would have made.
struct Entries {
  Ints slot_indices;
  Ints expected_tokens;
  Ints expected_positions;
  Ints prev_slot_indices;
  Ints batch_rows;
  int32_t num_valid = 0;
  int32_t enable = 1;
  std::vector<int32_t> row_status;
};

// What the launches that touch records share.
struct Launch {
  int32_t tag = 0;
  std::array<uint32_t, 2> context{};  // step, shard
  bool has_padding_slot = false;
  int64_t padding_slot = 0;
  bool extended = true;
  bool strict = true;

  bool tolerant() const { return extended && !strict; }
};

struct VerifyParts {
  Ints namespaces;
  bool check_token = false;
  bool rotate = false;
  std::array<int32_t, 2> source_window{};  // start, count
};

struct WriteParts {
  Ints write_offsets;
  Ints seed_slots;
  int32_t num_valid_reqs = 0;
  Ints input_ids;
  Ints positions;
  Ints out_cache_loc;
  bool assert_input = false;
  Ints expected_tokens;
  Ints expected_positions;
  int32_t chain_position_assert = 0;
  Ints req_pool_indices;
  Ints request_ids;
  Ints namespaces;
  uint32_t record_flags = 0;

  int64_t capacity() const { return write_offsets.size() - 1; }
  int64_t tokens() const { return input_ids.size(); }
};

struct ScatterParts {
  Ints flat_in;
  Ints offsets;
  Ints req_pool_indices;
  std::vector<int32_t> pool;  // [rows, width]
  int64_t rows = 0;
  int64_t width = 0;
};

enum class Op { kPlan, kVerify, kVerifyFused, kWrite, kScatter };
inline constexpr std::array<const char*, 5> kOpNames{"plan", "verify", "verify_fused", "write", "scatter"};

struct Case {
  uint64_t seed = 0;
  Op op = Op::kPlan;
  State state;
  Sources sources;
  Launch launch;
  Batch batch;  // of a planned verify: req_pool_indices only
  PlanShape plan;
  Entries entries;
  VerifyParts verify;
  WriteParts write;
  ScatterParts scatter;
};

using Row = std::array<uint64_t, kvcanary::kRingColumns>;

// Everything a launch leaves behind; what an op does not have stays empty.
struct Result {
  std::vector<uint32_t> records, tags, ring;
  int32_t write_index = 0;
  std::array<uint64_t, kvcanary::kNumLaunchTags> slot_runs{}, kernel_runs{};
  std::vector<int32_t> verdict, first_bad_position, unattested, first_unattested_position;
  std::vector<int64_t> slot_indices, expected_tokens, expected_positions, prev_slot_indices, batch_rows;
  int32_t num_valid = 0, enable = 0, num_valid_reqs = 0;
  std::vector<int64_t> write_offsets, seed_slots;
  std::vector<int32_t> row_status;
  std::vector<int32_t> pool, status;
};

}  // namespace kvtest

#endif  // KVCANARY_TESTS_CASE_H_
