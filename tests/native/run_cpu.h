// Running a case on the CPU kernels: memory whose every overrun a sanitizer sees, executors that reorder and mix the chunks.
#ifndef KVCANARY_TESTS_RUN_CPU_H_
#define KVCANARY_TESTS_RUN_CPU_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "bind.h"
#include "case.h"
#include "check.h"
#include "executor.h"
#include "kernels_cpu.h"
#include "model.h"

namespace kvtest {

// One allocation an operand; under a sanitizer nothing around its own bytes may be touched, bar up to 7 bytes in front of a shifted one.
class HostMemory final : public Memory {
 public:
  HostMemory() = default;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() override {
    for (void* start : blocks_) std::free(start);
  }

  void* place(const void* bytes, size_t size, int shift, Access access) override {
    // Some empty operands have no address at all.
    if (size == 0 && ++empties_ % 2 == 0) return nullptr;
    void* start = std::malloc(size + static_cast<size_t>(shift));
    if (start == nullptr) throw std::bad_alloc();
    blocks_.push_back(start);
    if (reinterpret_cast<uintptr_t>(start) % 16 != 0) throw std::logic_error("malloc returned memory that is not aligned to 16 bytes");
    unsigned char* data = static_cast<unsigned char*>(start) + shift;
    if (size > 0) std::memcpy(data, bytes, size);
    if (access == Access::kRead) {
      const unsigned char* from = static_cast<const unsigned char*>(bytes);
      inputs_.push_back({data, size > 0 ? std::vector<unsigned char>(from, from + size) : std::vector<unsigned char>()});
    }
#if defined(__SANITIZE_ADDRESS__)
    if (shift >= 8) ASAN_POISON_MEMORY_REGION(start, 8);
#endif
    return data;
  }
  void fetch(void* to, const void* from, size_t size) override { std::memcpy(to, from, size); }

  bool inputs_are_unchanged() const {
    for (const Input& input : inputs_) {
      if (!input.copy.empty() && std::memcmp(input.data, input.copy.data(), input.copy.size()) != 0) return false;
    }
    return true;
  }

 private:
  struct Input {
    const unsigned char* data;
    std::vector<unsigned char> copy;
  };
  std::vector<void*> blocks_;
  std::vector<Input> inputs_;
  int64_t empties_ = 0;
};

class ReverseExecutor final : public kvcanary::Executor {
 public:
  void run(int64_t chunks, const std::function<void(int64_t)>& body) override {
    for (int64_t i = chunks; i > 0; --i) body(i - 1);
  }
};

class ThreadExecutor final : public kvcanary::Executor {
 public:
  void run(int64_t chunks, const std::function<void(int64_t)>& body) override {
    std::atomic<int64_t> next{0};
    const auto drain = [&] {
      for (int64_t i = next.fetch_add(1); i < chunks; i = next.fetch_add(1)) body(i);
    };
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < std::min<int64_t>(chunks, 3); ++i) threads.emplace_back(drain);
    drain();
    for (std::thread& thread : threads) thread.join();
  }
};

// Passes work on, and remembers the most chunks that were seen.
class CountingExecutor final : public kvcanary::Executor {
 public:
  explicit CountingExecutor(kvcanary::Executor& to) : to_(to) {}
  void run(int64_t chunks, const std::function<void(int64_t)>& body) override {
    most_ = std::max(most_, chunks);
    to_.run(chunks, body);
  }
  int64_t most_chunks() const { return most_; }

 private:
  kvcanary::Executor& to_;
  int64_t most_ = 0;
};

struct CpuRun {
  Result result;
  bool inputs_unchanged = true;
};

inline CpuRun run_cpu(const Case& c, kvcanary::Executor& executor) {
  namespace cpu = kvcanary::cpu;
  HostMemory memory;
  Binder binder(c, memory);
  if (c.op == Op::kPlan) {
    const kvcanary::RequestBatch batch = binder.batch();
    cpu::plan(batch, binder.plan_output(), executor);
  } else if (c.op == Op::kScatter) {
    cpu::scatter(binder.scatter(), executor);
  } else {
    const BoundSources bound = binder.sources();
    // The source table, too, is in memory of its exact size.
    const int32_t count = static_cast<int32_t>(bound.sources.size());
    const kvcanary::SourceSet set{
        static_cast<const kvcanary::Source*>(
            memory.place(bound.sources.data(), bound.sources.size() * sizeof(kvcanary::Source), 8, Access::kRead)),
        static_cast<const kvcanary::SourceGeometry*>(
            memory.place(bound.geometries.data(), bound.geometries.size() * sizeof(kvcanary::SourceGeometry), 0, Access::kRead)),
        count};
    if (c.op == Op::kWrite) {
      cpu::write(binder.write(bound, set), executor);
    } else {
      const kvcanary::VerifyArgs args = binder.verify(bound, set);
      if (c.op == Op::kVerify) {
        cpu::verify(args, binder.entries<cpu::PlannedEntries>(), executor);
      } else {
        cpu::verify_fused(args, binder.batch(), executor);
      }
    }
  }
  return {binder.result(), memory.inputs_are_unchanged()};
}

// The planned verify that must find what a fused one finds: its plan has room for everything, and 64 bits for every value.
inline Case planned_twin(const Case& fused, kvcanary::Executor& executor) {
  Case plan = fused;
  plan.op = Op::kPlan;
  plan.plan = {model_total(fused.batch) + 3, fused.batch.size(), true};
  plan.batch.stride = 1;
  plan.batch.extend_seq_lens.values.assign(static_cast<size_t>(fused.batch.size()), 0);
  Result planned = run_cpu(plan, executor).result;
  const int64_t stride = fused.batch.stride;
  if (stride > 1) {
    // The entries of this step, moved to the front.
    int32_t kept = 0;
    for (size_t i = 0; i < planned.slot_indices.size(); ++i) {
      if (planned.expected_positions[i] % stride != fused.launch.context[0] % stride) continue;
      for (std::vector<int64_t>* column : {&planned.slot_indices, &planned.expected_tokens, &planned.expected_positions,
                                           &planned.prev_slot_indices, &planned.batch_rows}) {
        (*column)[static_cast<size_t>(kept)] = (*column)[i];
      }
      ++kept;
    }
    planned.num_valid = kept;
  }
  Case out = fused;
  out.op = Op::kVerify;
  out.entries.slot_indices = {planned.slot_indices, true, 0};
  out.entries.expected_tokens = {planned.expected_tokens, true, 0};
  out.entries.expected_positions = {planned.expected_positions, true, 0};
  out.entries.prev_slot_indices = {planned.prev_slot_indices, true, 0};
  out.entries.batch_rows = {planned.batch_rows, true, 0};
  out.entries.num_valid = planned.num_valid;
  out.entries.enable = planned.enable;
  out.entries.row_status = planned.row_status;
  return out;
}

// Runs a case every way the CPU has; what is wrong with it, or nothing.
inline std::string check_on_cpu(const Case& c, const Expected& expected, Coverage& coverage) {
  const auto checked = [&](const Case& run_case, const Expected& want, kvcanary::Executor& executor, const char* how) {
    const CpuRun run = run_cpu(run_case, executor);
    std::string found = check(run_case, want, run.result, /*ordered=*/true);
    if (found.empty() && !run.inputs_unchanged) found = "an operand that is only read was changed";
    return found.empty() ? found : std::string(how) + ": " + found;
  };
  kvcanary::SerialExecutor serial;
  CountingExecutor counting(serial);
  std::string found = checked(c, expected, counting, "one thread");
  if (!found.empty()) return found;
  if (counting.most_chunks() > 1) {
    coverage.count(std::string(kOpNames[static_cast<size_t>(c.op)]) + "_chunked");
    ReverseExecutor reverse;
    found = checked(c, expected, reverse, "chunks in reverse");
    if (!found.empty()) return found;
    ThreadExecutor threads;
    found = checked(c, expected, threads, "threads");
    if (!found.empty()) return found;
  }
  if (c.op == Op::kVerifyFused) {
    const Case twin = planned_twin(c, serial);
    found = checked(twin, expected, serial, "as a plan and a planned verify");
  }
  return found;
}

}  // namespace kvtest

#endif  // KVCANARY_TESTS_RUN_CPU_H_
