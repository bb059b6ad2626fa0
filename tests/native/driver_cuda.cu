// Random cases on the CUDA kernels, in device memory of exactly each operand's size; what they leave behind must be what the CPU kernels
// leave. Every fourth launch goes through a graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "kernels_cuda.h"
#include "run_cpu.h"

namespace kvtest {
namespace {

namespace cuda = kvcanary::cuda;

void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

class DeviceMemory final : public Memory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() override {
    for (void* start : blocks_) cudaFree(start);
  }

  void* place(const void* bytes, size_t size, int shift, Access) override {
    // An empty operand has no address, or one at the very end of its memory.
    if (size == 0 && shift == 0) return nullptr;
    void* start = nullptr;
    must(cudaMalloc(&start, size + static_cast<size_t>(shift)), "cudaMalloc");
    blocks_.push_back(start);
    unsigned char* data = static_cast<unsigned char*>(start) + shift;
    if (size > 0) must(cudaMemcpy(data, bytes, size, cudaMemcpyHostToDevice), "copy to the device");
    return data;
  }
  void fetch(void* to, const void* from, size_t size) override {
    must(cudaMemcpy(to, from, size, cudaMemcpyDeviceToHost), "copy to the host");
  }

 private:
  std::vector<void*> blocks_;
};

// Launches on the stream, or captures the launch and replays it.
template <typename Launch>
void launch(cudaStream_t stream, bool as_graph, const Launch& body) {
  if (as_graph) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of the capture");
    const cudaError_t status = body();
    must(cudaStreamEndCapture(stream, &graph), "end of the capture");
    must(status, "captured launch");
    must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    must(cudaStreamSynchronize(stream), "kernels of a graph");
    must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  } else {
    must(body(), "launch");
    must(cudaStreamSynchronize(stream), "kernels");
  }
}

Result run_cuda(const Case& c, cudaStream_t stream) {
  DeviceMemory memory;
  Binder binder(c, memory);
  const bool as_graph = c.seed % 4 == 0;
  if (c.op == Op::kPlan) {
    const kvcanary::RequestBatch batch = binder.batch();
    const kvcanary::PlanOutput out = binder.plan_output();
    launch(stream, as_graph, [&] { return cuda::plan(stream, batch, out); });
  } else if (c.op == Op::kScatter) {
    const kvcanary::ScatterArgs args = binder.scatter();
    launch(stream, as_graph, [&] { return cuda::scatter(stream, args); });
  } else {
    const BoundSources bound = binder.sources();
    const int32_t count = static_cast<int32_t>(bound.sources.size());
    cuda::HostSources sources{{bound.sources.data(), bound.geometries.data(), count}, bound.geometries.size(), nullptr};
    sources.scratch = binder.space<unsigned char>(
        static_cast<int64_t>(bound.sources.size() * sizeof(kvcanary::Source) + bound.geometries.size() * sizeof(kvcanary::SourceGeometry)),
        8);
    if (c.op == Op::kWrite) {
      const kvcanary::WriteArgs args = binder.write(bound, sources.set);
      uint64_t* hashes = binder.space<uint64_t>(args.tokens, 8);
      uint32_t* tags = args.source_tags != nullptr ? binder.space<uint32_t>(args.tokens * count, 4) : nullptr;
      uint32_t* progress = binder.space<uint32_t>(cuda::write_progress_words(args.tokens), 4);
      launch(stream, as_graph, [&] { return cuda::write(stream, args, {hashes, tags, progress}, sources); });
    } else {
      const kvcanary::VerifyArgs args = binder.verify(bound, sources.set);
      if (c.op == Op::kVerify) {
        const cuda::PlannedEntries entries = binder.entries<cuda::PlannedEntries>();
        launch(stream, as_graph, [&] { return cuda::verify(stream, args, entries, sources); });
      } else {
        const kvcanary::RequestBatch batch = binder.batch();
        int64_t* entry_offsets = binder.space<int64_t>(batch.size() + 1, 8);
        launch(stream, as_graph, [&] { return cuda::verify_fused(stream, args, batch, entry_offsets, sources); });
      }
    }
  }
  return binder.result();
}

// The CPU's results, and every row that a launch reports: from a run whose ring has room for all of them.
Expected cpu_outcome(const Case& c, const Expected& expected) {
  kvcanary::SerialExecutor serial;
  Expected out = expected;
  out.result = run_cpu(c, serial).result;
  if (!expected.reports) return out;
  out.result.ring = c.state.ring.values;
  Case roomy = c;
  roomy.state.write_index = 0;
  roomy.state.ring_rows = static_cast<int64_t>(expected.rows.size()) + 1;
  roomy.state.ring.values.assign(static_cast<size_t>(roomy.state.ring_rows * kvcanary::kRingWords), 0);
  const Result full = run_cpu(roomy, serial).result;
  out.rows.clear();
  for (int64_t i = 0; i < std::min<int64_t>(full.write_index, roomy.state.ring_rows); ++i) out.rows.push_back(ring_row(full.ring, i));
  return out;
}

std::string check_on_cuda(const Case& c, const Expected& expected, Coverage& coverage, cudaStream_t stream) {
  const std::string on_cpu = check_on_cpu(c, expected, coverage);
  if (!on_cpu.empty()) return "CPU: " + on_cpu;
  const std::string found = check(c, cpu_outcome(c, expected), run_cuda(c, stream), /*ordered=*/false);
  return found.empty() ? found : "CUDA: " + found;
}

}  // namespace
}  // namespace kvtest

int main(int argc, char** argv) {
  kvtest::Options defaults;
  defaults.giant_one_in = 150;
  const kvtest::Options options = kvtest::parse_options(argc, argv, defaults);
  cudaStream_t stream = nullptr;
  const cudaError_t status = cudaStreamCreate(&stream);
  if (status != cudaSuccess) {
    std::fprintf(stderr, "no CUDA device: %s\n", cudaGetErrorString(status));
    return 3;
  }
  const int code =
      kvtest::run_cases(options, [stream](const kvtest::Case& c, const kvtest::Expected& expected, kvtest::Coverage& coverage) {
        return kvtest::check_on_cuda(c, expected, coverage, stream);
      });
  cudaStreamDestroy(stream);
  return code;
}
