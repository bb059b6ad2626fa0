// From a case to a kernel's arguments: every operand in memory of exactly its size, and the results read back from it.
#ifndef KVCANARY_TESTS_BIND_H_
#define KVCANARY_TESTS_BIND_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "case.h"
#include "model.h"
#include "plan_output.h"
#include "scatter_args.h"
#include "source.h"
#include "table.h"
#include "verify_entry.h"
#include "write_entry.h"

namespace kvtest {

enum class Access { kRead, kWrite };

// Where a backend's operands lie. `place` returns memory of exactly `size` bytes that starts `shift` bytes past a multiple of 16.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* place(const void* bytes, size_t size, int shift, Access access) = 0;
  virtual void fetch(void* to, const void* from, size_t size) = 0;
};

// Sources as a handler decodes them; the arrays are on the host.
struct BoundSources {
  std::vector<kvcanary::Source> sources;
  std::vector<kvcanary::SourceGeometry> geometries;
  int64_t slots = kMax32;
};

class Binder {
 public:
  Binder(const Case& c, Memory& memory) : case_(c), memory_(memory), reading_(reading(c)) {}

  // --- arguments ---

  kvcanary::RequestBatch batch() {
    const Batch& b = case_.batch;
    kvcanary::RequestBatch out;
    out.req_pool_indices = ints(b.req_pool_indices);
    out.prefix_lens = ints(b.prefix_lens);
    out.extend_seq_lens = ints(b.extend_seq_lens);
    out.table = ints(b.table);
    out.table_starts = ints(b.table_starts);
    out.table_rows = b.table_rows;
    out.table_width = b.table_width;
    out.page_size = b.page_size;
    out.kind = b.kind;
    out.has_mapping = b.has_mapping;
    out.mapping = ints(b.mapping);
    out.has_expected = b.has_expected;
    out.expected_tokens = ints(b.expected_tokens);
    out.expected_rows = b.expected_rows;
    out.expected_width = b.expected_width;
    out.valid_lens = ints(b.valid_lens);
    out.token_offset = b.token_offset;
    out.window = b.window;
    out.stride = b.stride;
    out.step = input(case_.launch.context.data(), 1, 4);
    out.has_padding_req = b.has_padding_req;
    out.padding_req = b.padding_req;
    return out;
  }

  kvcanary::PlanOutput plan_output() {
    const PlanShape& shape = case_.plan;
    kvcanary::PlanOutput& out = plan_;
    out.verify_capacity = shape.verify_capacity;
    out.write_req_capacity = shape.write_req_capacity;
    for (kvcanary::IntOutput* array :
         {&out.slot_indices, &out.expected_tokens, &out.expected_positions, &out.prev_slot_indices, &out.batch_rows}) {
      *array = int_output(shape.verify_capacity);
    }
    out.num_valid = space<int32_t>(1, 4);
    out.enable = space<int32_t>(1, 8);
    out.write_offsets = int_output(shape.write_req_capacity + 1);
    out.seed_slots = int_output(shape.write_req_capacity);
    out.num_valid_reqs = space<int32_t>(1, 12);
    out.row_status = space<int32_t>(case_.batch.size(), 4);
    out.entry_offsets = space<int64_t>(case_.batch.size() + 1, 8);
    return out;
  }

  // `sources`: the source table where the kernel is to find it.
  kvcanary::VerifyArgs verify(const BoundSources& bound, const kvcanary::SourceSet& sources) {
    kvcanary::VerifyArgs out;
    bind_state(bound, out.records, out.slots, out.log);
    if (reading_.tags) out.source_tags = tags_;
    const VerifyParts& v = case_.verify;
    out.source_window = input(v.source_window.data(), 2, 4);
    out.sources = sources;
    out.context.values = input(case_.launch.context.data(), 2, 8);
    out.req_pool_indices = ints(case_.batch.req_pool_indices);
    out.namespaces = ints(v.namespaces);
    out.batch_size = case_.batch.size();
    out.verdict = verdict_ = space<int32_t>(out.batch_size, 4);
    out.first_bad_position = first_bad_position_ = space<int32_t>(out.batch_size, 8);
    out.unattested = unattested_ = space<int32_t>(out.batch_size, 12);
    out.first_unattested_position = first_unattested_position_ = space<int32_t>(out.batch_size, 4);
    out.padding_slot = case_.launch.padding_slot;
    out.launch_tag = case_.launch.tag;
    out.has_padding_slot = case_.launch.has_padding_slot;
    out.check_token = v.check_token;
    out.extended = case_.launch.extended;
    out.tolerant = case_.launch.tolerant();
    out.rotate = v.rotate && case_.sources.mode != kvcanary::kModeNone;
    return out;
  }

  template <typename PlannedEntries>
  PlannedEntries entries() {
    const Entries& e = case_.entries;
    PlannedEntries out;
    out.slot_indices = ints(e.slot_indices);
    out.expected_tokens = ints(e.expected_tokens);
    out.expected_positions = ints(e.expected_positions);
    out.prev_slot_indices = ints(e.prev_slot_indices);
    out.batch_rows = ints(e.batch_rows);
    out.num_valid = input(&e.num_valid, 1, 0);
    out.enable = input(&e.enable, 1, 4);
    out.row_status = input(e.row_status.data(), e.row_status.size(), 12);
    return out;
  }

  kvcanary::WriteArgs write(const BoundSources& bound, const kvcanary::SourceSet& sources) {
    const WriteParts& w = case_.write;
    kvcanary::WriteArgs out;
    bind_state(bound, out.records, out.slots, out.log);
    if (reading_.tags) out.source_tags = tags_;
    out.sources = sources;
    out.context.values = input(case_.launch.context.data(), 2, 8);
    out.write_offsets = ints(w.write_offsets);
    out.seed_slots = ints(w.seed_slots);
    out.num_valid_reqs = input(&w.num_valid_reqs, 1, 4);
    out.input_ids = ints(w.input_ids);
    out.positions = ints(w.positions);
    out.out_cache_loc = ints(w.out_cache_loc);
    out.expected_tokens = ints(w.expected_tokens);
    out.expected_positions = ints(w.expected_positions);
    out.chain_position_assert = input(&w.chain_position_assert, 1, 12);
    out.req_pool_indices = ints(w.req_pool_indices);
    out.request_ids = ints(w.request_ids);
    out.namespaces = ints(w.namespaces);
    out.capacity = w.capacity();
    out.verdict = verdict_ = space<int32_t>(out.capacity, 4);
    out.tokens = w.tokens();
    out.padding_slot = case_.launch.padding_slot;
    out.launch_tag = case_.launch.tag;
    out.record_flags = w.record_flags;
    out.has_padding_slot = case_.launch.has_padding_slot;
    out.assert_input = w.assert_input;
    out.extended = case_.launch.extended;
    out.tolerant = case_.launch.tolerant();
    return out;
  }

  kvcanary::ScatterArgs scatter() {
    const ScatterParts& s = case_.scatter;
    kvcanary::ScatterArgs out;
    out.flat_in = ints(s.flat_in);
    out.offsets = ints(s.offsets);
    out.req_pool_indices = ints(s.req_pool_indices);
    out.pool = pool_ = state(s.pool.data(), s.pool.size(), 4);
    out.status = status_ = space<int32_t>(s.req_pool_indices.size(), 8);
    out.rows = s.rows;
    out.width = s.width;
    return out;
  }

  // Places the buffers and describes them as the handlers do: equal geometries once, pieces as large as every address allows.
  BoundSources sources() {
    BoundSources out;
    out.slots = reading_.slots;
    std::vector<const unsigned char*> buffers;
    for (const Bytes& b : case_.sources.buffers) buffers.push_back(input(b.values.data(), b.values.size(), b.shift));
    for (size_t k = 0; k < reading_.read_bytes.size(); ++k) {
      const SourceSpec& s = case_.sources.specs[k];
      kvcanary::SourceGeometry g{};
      g.page_stride = s.page_stride;
      g.token_stride = s.token_stride;
      g.run_bytes = s.run_bytes;
      g.page_size = static_cast<uint32_t>(s.page_size);
      g.read_bytes = reading_.read_bytes[k];
      const bool one_run = g.read_bytes <= g.run_bytes;
      int64_t moves = s.offset | s.page_stride | s.token_stride | g.read_bytes | case_.sources.buffers[static_cast<size_t>(s.buffer)].shift;
      if (!one_run) moves |= s.run_bytes;
      for (size_t level = 0; level < 4; ++level) {
        g.run_counts[level] = static_cast<int32_t>(s.counts[level]);
        g.run_strides[level] = s.strides[level];
        if (!one_run && s.counts[level] > 1) moves |= s.strides[level];
      }
      g.piece = 1;
      while (g.piece < 16 && g.piece < case_.sources.max_piece && moves % (2 * g.piece) == 0) g.piece *= 2;
      const auto known = std::find(out.geometries.begin(), out.geometries.end(), g);
      out.sources.push_back({at(buffers[static_cast<size_t>(s.buffer)], s.offset), known - out.geometries.begin()});
      if (known == out.geometries.end()) out.geometries.push_back(g);
    }
    return out;
  }

  // --- results ---

  Result result() {
    Result out;
    if (case_.op == Op::kPlan) {
      const int64_t bs = case_.batch.size();
      const PlanShape& shape = case_.plan;
      memory_.fetch(&out.num_valid, plan_.num_valid, 4);
      memory_.fetch(&out.enable, plan_.enable, 4);
      memory_.fetch(&out.num_valid_reqs, plan_.num_valid_reqs, 4);
      // Entries are specified up to num_valid only, and only where the plan is enabled.
      const int64_t n = out.enable != 0 ? std::clamp<int64_t>(out.num_valid, 0, shape.verify_capacity) : 0;
      out.slot_indices = fetch_ints(plan_.slot_indices, n);
      out.expected_tokens = fetch_ints(plan_.expected_tokens, n);
      out.expected_positions = fetch_ints(plan_.expected_positions, n);
      out.prev_slot_indices = fetch_ints(plan_.prev_slot_indices, n);
      out.batch_rows = fetch_ints(plan_.batch_rows, n);
      out.write_offsets = fetch_ints(plan_.write_offsets, shape.write_req_capacity + 1);
      out.seed_slots = fetch_ints(plan_.seed_slots, shape.write_req_capacity);
      out.row_status = fetch_all(plan_.row_status, bs);
    } else if (case_.op == Op::kScatter) {
      out.pool = fetch_all(pool_, case_.scatter.rows * case_.scatter.width);
      out.status = fetch_all(status_, case_.scatter.req_pool_indices.size());
    } else {
      const State& s = case_.state;
      out.records = fetch_all(records_, s.slots * s.words);
      out.tags = fetch_all(tags_, static_cast<int64_t>(s.tags.values.size()));
      out.ring = fetch_all(ring_, s.ring_rows * kvcanary::kRingWords);
      memory_.fetch(&out.write_index, write_index_, 4);
      memory_.fetch(out.slot_runs.data(), slot_runs_, sizeof(out.slot_runs));
      memory_.fetch(out.kernel_runs.data(), kernel_runs_, sizeof(out.kernel_runs));
      const bool is_write = case_.op == Op::kWrite;
      out.verdict = fetch_all(verdict_, is_write ? case_.write.capacity() : case_.batch.size());
      if (is_write) return out;
      out.first_bad_position = fetch_all(first_bad_position_, case_.batch.size());
      out.unattested = fetch_all(unattested_, case_.batch.size());
      out.first_unattested_position = fetch_all(first_unattested_position_, case_.batch.size());
    }
    return out;
  }

  // Memory for `count` values, filled with nothing in particular.
  template <typename T>
  T* space(int64_t count, int shift) {
    const std::vector<unsigned char> garbage(static_cast<size_t>(count) * sizeof(T), 0xA5);
    return static_cast<T*>(memory_.place(garbage.data(), garbage.size(), shift, Access::kWrite));
  }

 private:
  // The address, also where it lies outside of a buffer that nothing is read from.
  static const unsigned char* at(const unsigned char* base, int64_t offset) {
    return reinterpret_cast<const unsigned char*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset));
  }

  template <typename T>
  const T* input(const T* values, size_t count, int shift) {
    return static_cast<const T*>(memory_.place(values, count * sizeof(T), shift, Access::kRead));
  }
  template <typename T>
  T* state(const T* values, size_t count, int shift) {
    return static_cast<T*>(memory_.place(values, count * sizeof(T), shift, Access::kWrite));
  }

  kvcanary::IntArray ints(const Ints& a) {
    kvcanary::IntArray out{nullptr, a.size(), a.wide};
    if (a.wide) {
      out.data = input(a.values.data(), a.values.size(), a.shift);
    } else {
      const std::vector<int32_t> narrow(a.values.begin(), a.values.end());
      out.data = input(narrow.data(), narrow.size(), a.shift);
    }
    return out;
  }

  kvcanary::IntOutput int_output(int64_t count) {
    if (case_.plan.wide) return {space<int64_t>(count, 8), true};
    return {space<int32_t>(count, 4), false};
  }

  void bind_state(const BoundSources& bound, kvcanary::RecordTable& records, int64_t& slots, kvcanary::ViolationLog& log) {
    const State& s = case_.state;
    records.data = records_ = state(s.records.values.data(), s.records.values.size(), s.records.shift);
    records.slots = s.slots;
    records.words = s.words;
    records.vector = s.words % 4 == 0 && s.records.shift == 0;
    slots = std::min(s.slots, bound.slots);
    tags_ = state(s.tags.values.data(), s.tags.values.size(), s.tags.shift);
    log.ring = ring_ = state(s.ring.values.data(), s.ring.values.size(), s.ring.shift);
    log.rows = s.ring_rows;
    log.write_index = write_index_ = state(&s.write_index, 1, 4);
    slot_runs_ = state(s.slot_runs.data(), s.slot_runs.size(), 8);
    kernel_runs_ = state(s.kernel_runs.data(), s.kernel_runs.size(), 0);
    log.slot_runs = slot_runs_ + case_.launch.tag;
    log.kernel_runs = kernel_runs_ + case_.launch.tag;
  }

  template <typename T>
  std::vector<T> fetch_all(const T* from, int64_t count) {
    std::vector<T> out(static_cast<size_t>(count));
    if (count > 0) memory_.fetch(out.data(), from, out.size() * sizeof(T));
    return out;
  }

  std::vector<int64_t> fetch_ints(const kvcanary::IntOutput& from, int64_t count) {
    if (from.wide) return fetch_all(static_cast<const int64_t*>(from.data), count);
    const std::vector<int32_t> narrow = fetch_all(static_cast<const int32_t*>(from.data), count);
    return {narrow.begin(), narrow.end()};
  }

  const Case& case_;
  Memory& memory_;
  Reading reading_;
  uint32_t* records_ = nullptr;
  uint32_t* tags_ = nullptr;
  uint32_t* ring_ = nullptr;
  int32_t* write_index_ = nullptr;
  uint64_t* slot_runs_ = nullptr;
  uint64_t* kernel_runs_ = nullptr;
  int32_t* verdict_ = nullptr;
  int32_t* first_bad_position_ = nullptr;
  int32_t* unattested_ = nullptr;
  int32_t* first_unattested_position_ = nullptr;
  int32_t* pool_ = nullptr;
  int32_t* status_ = nullptr;
  kvcanary::PlanOutput plan_;
};

}  // namespace kvtest

#endif  // KVCANARY_TESTS_BIND_H_
