// Signature and checks of every op, written once: a custom call's frame becomes the kernel's arguments.
#ifndef KVCANARY_FFI_OPS_H_
#define KVCANARY_FFI_OPS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "frame.h"
#include "plan_output.h"
#include "scatter_args.h"
#include "source.h"
#include "table.h"
#include "verify_entry.h"
#include "write_entry.h"

namespace kvcanary {

// Host copies of what a SourceSet points to.
struct SourceArrays {
  std::vector<Source> sources;
  std::vector<SourceGeometry> geometries;
  int64_t slots = kInt32Max;  // of the smallest source that is read

  SourceSet set() const { return {sources.data(), geometries.data(), static_cast<int32_t>(sources.size())}; }
};

inline constexpr int64_t kSourceTableColumns = 16;

// Largest power of two up to 16 that divides everything that moves an address.
inline int32_t piece_bytes(uint64_t alignment_bits) {
  for (int32_t piece = 16; piece > 1; piece /= 2) {
    if (alignment_bits % static_cast<uint64_t>(piece) == 0) return piece;
  }
  return 1;
}

// Checks one row of the source table against its buffer and adds it.
inline void decode_source(Frame& frame, const int64_t* row, const std::vector<BufferView>& buffers, int32_t mode,
                          const std::string& name, SourceArrays& out) {
  const int64_t index = row[0], offset = row[1], pages = row[2], page_size = row[3];
  SourceGeometry g{};
  g.page_stride = row[4];
  g.token_stride = row[5];
  g.run_bytes = row[14];
  const int64_t read_bytes = row[15];
  if (index < 0 || index >= static_cast<int64_t>(buffers.size())) return frame.fail(name + " names a buffer that is not there");
  const BufferView& buffer = buffers[static_cast<size_t>(index)];
  const int64_t bits = element_bits(buffer.dtype);
  if (bits == 0) return frame.fail(name + ": the buffer's element type is not known");
  const __int128 size = (static_cast<__int128>(buffer.elements()) * bits) / 8;
  const int64_t top = int64_t{1} << 58;
  if (offset < 0 || offset > top || pages < 0 || pages > kInt32Max || page_size < 1 || page_size > kInt32Max || g.page_stride < 0 ||
      g.page_stride > top || g.token_stride < 0 || g.token_stride > top || g.run_bytes < 1 || g.run_bytes > top || read_bytes < 0) {
    return frame.fail(name + " has a number out of range");
  }
  __int128 run_total = g.run_bytes;
  __int128 extent = static_cast<__int128>(offset) + g.run_bytes;
  uint64_t moves = static_cast<uint64_t>(offset) | static_cast<uint64_t>(g.page_stride) | static_cast<uint64_t>(g.token_stride);
  uint64_t run_moves = static_cast<uint64_t>(g.run_bytes);
  for (int level = 0; level < kRunLevels; ++level) {
    const int64_t count = row[6 + level], stride = row[10 + level];
    if (count < 1 || count > kInt32Max || stride < 0 || stride > top) return frame.fail(name + " has a run out of range");
    g.run_counts[level] = static_cast<int32_t>(count);
    g.run_strides[level] = stride;
    run_total *= count;
    extent += static_cast<__int128>(count - 1) * stride;
    if (run_total > top || extent > (static_cast<__int128>(1) << 62)) return frame.fail(name + " does not fit its buffer");
    if (count > 1) run_moves |= static_cast<uint64_t>(stride);
  }
  if (read_bytes > run_total) return frame.fail(name + " reads more bytes than a slot has");
  if (pages > 0) {
    extent += static_cast<__int128>(pages - 1) * g.page_stride + static_cast<__int128>(page_size - 1) * g.token_stride;
    if (extent > size) return frame.fail(name + " does not fit its buffer");
  }
  const int64_t slots = std::min(static_cast<__int128>(kInt32Max), static_cast<__int128>(pages) * page_size);
  g.page_size = static_cast<uint32_t>(page_size);
  g.read_bytes = mode == kModePartial ? std::min(kPartialBytes, read_bytes) : read_bytes;
  // A source without pages may start past its buffer: no slot of it is ever read.
  const unsigned char* base = static_cast<const unsigned char*>(buffer.data) + (pages > 0 ? offset : 0);
  moves |= reinterpret_cast<uintptr_t>(buffer.data) | static_cast<uint64_t>(g.read_bytes);
  if (!is_one_run(g)) moves |= run_moves;
  g.piece = piece_bytes(moves);
  if (g.read_bytes > 0) out.slots = std::min(out.slots, slots);

  const auto known = std::find(out.geometries.begin(), out.geometries.end(), g);
  out.sources.push_back({base, known - out.geometries.begin()});
  if (known == out.geometries.end()) out.geometries.push_back(g);
}

// All sources of a call; `count` also where the mode reads none of them.
inline SourceArrays decode_sources(Frame& frame, const std::vector<BufferView>& buffers, int32_t mode, int64_t count) {
  SourceArrays out;
  const ffi::Span<const int64_t> table = frame.attr_array("source_table");
  if (!frame.ok() || count == 0) return out;
  if (static_cast<int64_t>(table.size()) != count * kSourceTableColumns) {
    frame.fail("attribute source_table must hold " + std::to_string(count * kSourceTableColumns) + " numbers");
    return out;
  }
  for (int64_t i = 0; i < count && frame.ok(); ++i) {
    decode_source(frame, table.begin() + i * kSourceTableColumns, buffers, mode, "source " + std::to_string(i), out);
  }
  return out;
}

// Records, tags and log of a call: operands first, then their results.
struct StateOperands {
  BufferView records, source_tags, ring, write_index, slot_runs, kernel_runs;
};

inline StateOperands state_operands(Frame& frame) {
  StateOperands s;
  s.records = frame.next_arg("records");
  s.source_tags = frame.next_arg("source_tags");
  s.ring = frame.next_arg("ring");
  s.write_index = frame.arg("write_index", ffi::DataType::S32, {1});
  s.slot_runs = frame.arg("slot_run_counter", ffi::DataType::U32, {kNumLaunchTags, 2});
  s.kernel_runs = frame.arg("kernel_run_counter", ffi::DataType::U32, {kNumLaunchTags, 2});
  if (!frame.ok()) return s;
  if (s.records.dtype != ffi::DataType::U32 || s.records.dims.size() != 2 || s.records.dims[1] < kRecordWords ||
      s.records.dims[0] > kInt32Max || s.records.dims[1] > kInt32Max) {
    frame.fail("records must be uint32 [slots, 8] or wider, got shape " + Frame::text(s.records.dims));
  } else if (s.source_tags.dtype != ffi::DataType::U32 || s.source_tags.dims.size() != 2) {
    frame.fail("source_tags must be uint32 [slots, sources], got shape " + Frame::text(s.source_tags.dims));
  } else if (s.ring.dtype != ffi::DataType::U32 || s.ring.dims.size() != 2 || s.ring.dims[1] != kRingWords) {
    frame.fail("ring must be uint32 [rows, 32], got shape " + Frame::text(s.ring.dims));
  }
  return s;
}

inline RecordTable record_table(const BufferView& v, void* data) {
  RecordTable t;
  t.data = static_cast<uint32_t*>(data);
  t.slots = v.dims[0];
  t.words = static_cast<int32_t>(v.dims[1]);
  t.vector = t.words % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return t;
}

// Tags stand beside the records, one column a source.
inline bool has_source_tags(Frame& frame, const StateOperands& s, int64_t sources) {
  const std::vector<int64_t>& dims = s.source_tags.dims;
  if (dims[0] == 0 && dims[1] == 0) return false;
  if (dims[0] != s.records.dims[0] || dims[1] != sources) {
    frame.fail("source_tags must have shape (slots, sources), got " + Frame::text(dims));
    return false;
  }
  return sources > 0;
}

inline ViolationLog log_results(Frame& frame, const StateOperands& s, int32_t launch_tag) {
  ViolationLog log;
  log.ring = static_cast<uint32_t*>(frame.ret_state("ring", s.ring));
  log.rows = std::min<int64_t>(s.ring.dims.empty() ? 0 : s.ring.dims[0], kInt32Max);
  log.write_index = static_cast<int32_t*>(frame.ret_state("write_index", s.write_index));
  uint64_t* slot_runs = static_cast<uint64_t*>(frame.ret_state("slot_run_counter", s.slot_runs));
  uint64_t* kernel_runs = static_cast<uint64_t*>(frame.ret_state("kernel_run_counter", s.kernel_runs));
  if (frame.ok()) {
    log.slot_runs = slot_runs + launch_tag;
    log.kernel_runs = kernel_runs + launch_tag;
  }
  return log;
}

inline std::vector<BufferView> remaining_buffers(Frame& frame) {
  std::vector<BufferView> buffers;
  while (frame.ok() && frame.args_left() > 0) buffers.push_back(frame.next_arg("real_kv_buffers"));
  return buffers;
}

// Bytes of scratch that a launch may use to hold its source table on the device.
inline int64_t source_scratch_bytes(const SourceArrays& a) {
  return static_cast<int64_t>(a.sources.size() * sizeof(Source) + a.geometries.size() * sizeof(SourceGeometry));
}

struct LaunchAttrs {
  int32_t launch_tag;
  int32_t mode;
  int64_t num_sources;
};

inline LaunchAttrs launch_attrs(Frame& frame) {
  LaunchAttrs a;
  a.launch_tag = static_cast<int32_t>(frame.attr_in("launch_tag", 0, kNumLaunchTags - 1));
  a.mode = static_cast<int32_t>(frame.attr_in("real_kv_hash_mode", kModeNone, kModeAll));
  a.num_sources = frame.attr_in("num_sources", 0, kInt32Max);
  return a;
}

// --- plan ---

inline RequestBatch batch_attrs(Frame& frame) {
  RequestBatch b;
  b.kind = static_cast<int32_t>(frame.attr_in("table_kind", kTableRows, kTableIdentity));
  b.page_size = frame.attr_in("table_page_size", 1, kInt32Max);
  b.table_rows = frame.attr_in("table_rows", 0, kInt32Max);
  b.table_width = frame.attr_in("table_width", 0, kInt32Max);
  b.window = frame.attr_in("swa_window_size", 0, kInt32Max);
  b.token_offset = frame.attr_in("kv_token_id_vs_position_offset", -kInt32Max - 1, kInt32Max);
  b.has_padding_req = frame.flag("has_padding_req");
  b.padding_req = frame.attr("padding_req");
  b.has_mapping = frame.flag("has_mapping");
  b.has_expected = frame.flag("has_expected");
  return b;
}

// Table, mapping and expected tokens, which follow the lengths of the batch.
inline void batch_tables(Frame& frame, RequestBatch& b) {
  const int64_t bs = b.size();
  const auto [table, dims] = frame.table("table");
  b.table = table;
  b.table_starts = frame.ints("table_starts", b.kind == kTableFlat ? bs + 1 : -1);
  b.mapping = frame.ints("mapping");
  const auto [expected, expected_dims] = frame.table("expected_tokens");
  b.expected_tokens = expected;
  b.valid_lens = frame.ints("valid_lens", b.has_expected ? bs : -1);
  if (!frame.ok()) return;
  if (b.kind == kTableRows || b.kind == kTableBlocks) {
    if (dims.size() != 2) return frame.fail("table must be 2-D, got shape " + Frame::text(dims));
    b.table_rows = dims[0];
    b.table_width = dims[1];
    if (b.kind == kTableBlocks && b.table_width > kInt32Max / b.page_size) {
      return frame.fail("blocks x table_page_size must fit in int32");
    }
  } else if (b.kind == kTableFlat && dims.size() != 1) {
    return frame.fail("table must be 1-D, got shape " + Frame::text(dims));
  } else if (b.kind == kTableIdentity && b.table_rows * b.table_width > kInt32Max) {
    return frame.fail("table_rows x table_width must fit in int32");
  }
  if (b.has_expected) {
    if (expected_dims.size() != 2) return frame.fail("expected_tokens must be 2-D, got shape " + Frame::text(expected_dims));
    b.expected_rows = expected_dims[0];
    b.expected_width = expected_dims[1];
  }
}

struct PlanCall {
  RequestBatch batch;
  PlanOutput out;
};

inline PlanCall decode_plan(Frame& frame) {
  PlanCall call;
  RequestBatch& b = call.batch;
  b = batch_attrs(frame);
  PlanOutput& out = call.out;
  out.verify_capacity = frame.attr_in("verify_capacity", 0, kInt32Max);
  out.write_req_capacity = frame.attr_in("write_req_capacity", 0, kInt32Max - 1);
  const bool wide = frame.flag("wide");
  b.req_pool_indices = frame.ints("req_pool_indices");
  const int64_t bs = b.size();
  b.prefix_lens = frame.ints("prefix_lens", bs);
  b.extend_seq_lens = frame.ints("extend_seq_lens", bs);
  batch_tables(frame, b);
  if (frame.ok() && bs > out.write_req_capacity) frame.fail("the batch exceeds write_req_capacity");
  const int64_t n = out.verify_capacity;
  out.slot_indices = frame.ret_ints("slot_indices", n, wide);
  out.expected_tokens = frame.ret_ints("expected_tokens", n, wide);
  out.expected_positions = frame.ret_ints("expected_positions", n, wide);
  out.prev_slot_indices = frame.ret_ints("prev_slot_indices", n, wide);
  out.batch_rows = frame.ret_ints("batch_rows", n, wide);
  out.num_valid = frame.ret_i32("num_valid", 1);
  out.enable = frame.ret_i32("enable", 1);
  out.write_offsets = frame.ret_ints("write_offsets", out.write_req_capacity + 1, wide);
  out.seed_slots = frame.ret_ints("write_seed_slot_indices", out.write_req_capacity, wide);
  out.num_valid_reqs = frame.ret_i32("write_num_valid_reqs", 1);
  out.row_status = frame.ret_i32("row_status", bs);
  out.entry_offsets = static_cast<int64_t*>(frame.ret_scratch("scratch", 8 * (bs + 1)).data);
  frame.finish();
  return call;
}

// --- verify ---

struct VerifyCall {
  VerifyArgs args;
  SourceArrays sources;
  std::vector<BufferView> buffers;
  void* scratch = nullptr;  // entry offsets of a fused verify, then the source table

  // Planned entries.
  IntArray slot_indices, expected_tokens, expected_positions, prev_slot_indices, batch_rows;
  const int32_t* num_valid = nullptr;
  const int32_t* enable = nullptr;
  const int32_t* row_status = nullptr;

  RequestBatch batch;  // of a fused verify
};

inline void verify_attrs(Frame& frame, VerifyArgs& a) {
  a.check_token = frame.flag("check_expected_token");
  a.has_padding_slot = frame.flag("has_padding_slot");
  a.padding_slot = frame.attr("padding_slot");
  a.extended = frame.flag("extended_checks");
  a.tolerant = !frame.flag("strict") && a.extended;
  a.rotate = frame.flag("rotate");
}

// What both forms of verify share after their entries: context, buffers, sources, results.
inline void finish_verify(Frame& frame, VerifyCall& call, const StateOperands& state, const LaunchAttrs& launch, int64_t scratch_bytes) {
  VerifyArgs& a = call.args;
  const bool pass_through = frame.flag("pass_through");
  a.batch_size = a.req_pool_indices.size;
  a.namespaces = frame.ints_up_to("namespaces", a.batch_size);
  a.context.values = frame.u32("context", 2);
  a.source_window = frame.i32("source_window", 2);
  call.buffers = remaining_buffers(frame);
  if (!frame.ok()) return;
  call.sources = decode_sources(frame, call.buffers, launch.mode, launch.num_sources);
  if (!frame.ok()) return;
  a.records = record_table(state.records, state.records.data);
  const bool tags = has_source_tags(frame, state, launch.num_sources);
  if (launch.mode == kModeNone) call.sources = SourceArrays{};
  a.source_tags = tags && launch.mode != kModeNone ? static_cast<const uint32_t*>(state.source_tags.data) : nullptr;
  if (a.rotate && !tags && launch.num_sources > 0 && a.records.slots > 0) frame.fail("rotate needs source_tags");
  a.rotate = a.rotate && tags && launch.mode != kModeNone;
  a.slots = std::min(a.records.slots, call.sources.slots);
  a.sources = call.sources.set();
  a.launch_tag = launch.launch_tag;
  a.log = log_results(frame, state, launch.launch_tag);
  a.verdict = frame.ret_i32("verdict", a.batch_size);
  a.first_bad_position = frame.ret_i32("first_bad_position", a.batch_size);
  a.unattested = frame.ret_i32("unattested", a.batch_size);
  a.first_unattested_position = frame.ret_i32("first_unattested_position", a.batch_size);
  call.scratch = frame.ret_scratch("scratch", scratch_bytes + source_scratch_bytes(call.sources)).data;
  if (pass_through) {
    for (const BufferView& buffer : call.buffers) frame.ret_state("real_kv_buffers", buffer);
  }
  frame.finish();
}

inline VerifyCall decode_verify(Frame& frame) {
  VerifyCall call;
  const LaunchAttrs launch = launch_attrs(frame);
  verify_attrs(frame, call.args);
  const StateOperands state = state_operands(frame);
  call.slot_indices = frame.ints("slot_indices");
  const int64_t n = call.slot_indices.size;
  call.expected_tokens = frame.ints("expected_tokens", n);
  call.expected_positions = frame.ints("expected_positions", n);
  call.prev_slot_indices = frame.ints("prev_slot_indices", n);
  call.batch_rows = frame.ints_up_to("batch_rows", n);
  call.num_valid = frame.i32("num_valid", 1);
  call.enable = frame.i32("enable", 1);
  BufferView status = frame.next_arg("row_status");
  call.args.req_pool_indices = frame.ints("req_pool_indices");
  frame.expect(status, "row_status", ffi::DataType::S32, {call.args.req_pool_indices.size});
  call.row_status = static_cast<const int32_t*>(status.data);
  finish_verify(frame, call, state, launch, 0);
  return call;
}

inline VerifyCall decode_verify_fused(Frame& frame) {
  VerifyCall call;
  const LaunchAttrs launch = launch_attrs(frame);
  verify_attrs(frame, call.args);
  call.batch = batch_attrs(frame);
  call.batch.stride = frame.attr_in("position_stride", 1, kInt32Max);
  const StateOperands state = state_operands(frame);
  RequestBatch& b = call.batch;
  b.req_pool_indices = frame.ints("req_pool_indices");
  b.prefix_lens = frame.ints("prefix_lens", b.size());
  batch_tables(frame, b);
  call.args.req_pool_indices = b.req_pool_indices;
  finish_verify(frame, call, state, launch, 8 * (b.size() + 1));
  b.step = call.args.context.values;
  return call;
}

// --- write ---

struct WriteCall {
  WriteArgs args;
  SourceArrays sources;
  std::vector<BufferView> buffers;
  void* scratch = nullptr;  // token hashes, token tags, progress, then the source table
};

// Scratch of a write before the source table: a 64-bit hash a token, a tag a token and source, a counter and one more for 32 tokens.
inline int64_t write_scratch_bytes(int64_t tokens, int64_t tagged_sources) {
  const int64_t bytes = 8 * tokens + 4 * tokens * tagged_sources + 4 * (1 + (tokens + 31) / 32);
  return (bytes + 15) / 16 * 16;
}

inline WriteCall decode_write(Frame& frame) {
  WriteCall call;
  WriteArgs& a = call.args;
  const LaunchAttrs launch = launch_attrs(frame);
  a.assert_input = frame.flag("enable_write_input_assert");
  a.has_padding_slot = frame.flag("has_padding_slot");
  a.padding_slot = frame.attr("padding_slot");
  a.extended = frame.flag("extended_checks");
  a.tolerant = !frame.flag("strict") && a.extended;
  a.record_flags = static_cast<uint32_t>(frame.attr_in("record_flags", 0, 0xFFFFFFFFll));
  const StateOperands state = state_operands(frame);
  a.write_offsets = frame.ints("write_offsets");
  a.capacity = a.write_offsets.size - 1;
  if (frame.ok() && a.capacity < 0) frame.fail("write_offsets must not be empty");
  a.seed_slots = frame.ints("write_seed_slot_indices", frame.ok() ? a.capacity : -1);
  a.num_valid_reqs = frame.i32("write_num_valid_reqs", 1);
  a.input_ids = frame.ints("input_ids");
  a.tokens = a.input_ids.size;
  a.positions = frame.ints("positions", a.tokens);
  a.out_cache_loc = frame.ints("out_cache_loc", a.tokens);
  a.expected_tokens = frame.ints("expected_input_tokens", a.assert_input ? a.tokens : -1);
  a.expected_positions = frame.ints("expected_input_positions", a.assert_input ? a.tokens : -1);
  a.chain_position_assert = frame.i32("enable_chain_position_assert", 1);
  a.req_pool_indices = frame.ints_up_to("req_pool_indices", a.capacity);
  a.request_ids = frame.ints_up_to("request_ids", a.capacity);
  a.namespaces = frame.ints_up_to("namespaces", a.capacity);
  a.context.values = frame.u32("context", 2);
  call.buffers = remaining_buffers(frame);
  if (!frame.ok()) return call;
  call.sources = decode_sources(frame, call.buffers, launch.mode, launch.num_sources);
  if (!frame.ok()) return call;
  const bool tags = has_source_tags(frame, state, launch.num_sources);
  if (launch.mode == kModeNone) {
    // Nothing is read: every source's tag is 0, and so is the hash.
    for (SourceGeometry& g : call.sources.geometries) g.read_bytes = 0;
    call.sources.slots = kInt32Max;
    if (!tags) call.sources = SourceArrays{};
  }
  a.sources = call.sources.set();
  a.records = record_table(state.records, frame.ret_state("records", state.records));
  a.slots = std::min(a.records.slots, call.sources.slots);
  void* tag_result = frame.ret_state("source_tags", state.source_tags);
  a.source_tags = tags ? static_cast<uint32_t*>(tag_result) : nullptr;
  a.launch_tag = launch.launch_tag;
  a.log = log_results(frame, state, launch.launch_tag);
  a.verdict = frame.ret_i32("verdict", a.capacity);
  call.scratch =
      frame.ret_scratch("scratch", write_scratch_bytes(a.tokens, tags ? launch.num_sources : 0) + source_scratch_bytes(call.sources)).data;
  frame.finish();
  return call;
}

// --- scatter ---

inline ScatterArgs decode_scatter(Frame& frame) {
  ScatterArgs a;
  a.flat_in = frame.ints("flat_in");
  a.offsets = frame.ints("offsets");
  if (frame.ok() && a.offsets.size < 1) frame.fail("offsets must not be empty");
  a.req_pool_indices = frame.ints("req_pool_indices", frame.ok() ? a.offsets.size - 1 : -1);
  const BufferView pool = frame.next_arg("pool_out");
  if (frame.ok() && (pool.dtype != ffi::DataType::S32 || pool.dims.size() != 2)) {
    frame.fail("pool_out must be int32 [rows, width], got shape " + Frame::text(pool.dims));
  }
  if (!frame.ok()) return a;
  a.rows = pool.dims[0];
  a.width = pool.dims[1];
  a.pool = static_cast<int32_t*>(frame.ret_state("pool_out", pool));
  a.status = frame.ret_i32("status", a.req_pool_indices.size);
  frame.finish();
  return a;
}

}  // namespace kvcanary

#endif  // KVCANARY_FFI_OPS_H_
