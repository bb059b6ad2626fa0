// Device time of the CUDA kernels without XLA: graphs of many launches, the median of several runs. bench_cuda [log2 of the slots]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "kernels_cuda.h"

namespace {

namespace cuda = kvcanary::cuda;
using kvcanary::IntArray;

constexpr int64_t kPage = 16;
constexpr int64_t kTokenBytes = 2048;
constexpr int64_t kRequests = 256;
constexpr int kLaunches = 20;

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
T* space(int64_t count) {
  void* out = nullptr;
  must(cudaMalloc(&out, static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)), "cudaMalloc");
  must(cudaMemset(out, 0, static_cast<size_t>(count) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(out);
}

template <typename T>
T* upload(const std::vector<T>& values) {
  T* out = space<T>(static_cast<int64_t>(values.size()));
  must(cudaMemcpy(out, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return out;
}

IntArray ints(const std::vector<int32_t>& values) { return {upload(values), static_cast<int64_t>(values.size()), false}; }

__global__ void fill(uint64_t* data, int64_t n) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    data[i] = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15ull;
  }
}

// Rows of 2 KiB gathered in the order of a table, not hashed: the ceiling of ALL.
__global__ void __launch_bounds__(512) gather(const uint4* data, const int32_t* slots, int64_t n, uint32_t* out) {
  const int lane = threadIdx.x % 32;
  uint32_t sum = 0;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < n; i += warps) {
    const uint4* row = data + static_cast<int64_t>(slots[i]) * (kTokenBytes / 16);
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = row[j * 32 + lane];
#pragma unroll
    for (int j = 0; j < 4; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345) *out = sum;
}

template <typename Launch>
double microseconds(cudaStream_t stream, const Launch& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kLaunches; ++i) must(launch(), "launch");
  must(cudaStreamEndCapture(stream, &graph), "end of capture");
  must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaEvent_t start, stop;
  must(cudaEventCreate(&start), "event");
  must(cudaEventCreate(&stop), "event");
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
    must(cudaEventRecord(start, stream), "record");
    must(cudaGraphLaunch(executable, stream), "graph");
    must(cudaEventRecord(stop, stream), "record");
    must(cudaStreamSynchronize(stream), "run");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, start, stop), "time");
    if (i > 0) times.push_back(1000.0 * ms / kLaunches);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return times[times.size() / 2];
}

struct Pool {
  int64_t slots;
  unsigned char* kv;
  kvcanary::SourceGeometry geometry{};
  kvcanary::Source source{};
  void* scratch;
  kvcanary::RecordTable records;
  kvcanary::ViolationLog log;
  uint32_t* context;
  int32_t* write_index;

  explicit Pool(int64_t n) : slots(n) {
    kv = space<unsigned char>(n * kTokenBytes);
    fill<<<1024, 256>>>(reinterpret_cast<uint64_t*>(kv), n * kTokenBytes / 8);
    scratch = space<unsigned char>(4096);
    records.data = space<uint32_t>(n * 8);
    records.slots = n;
    records.words = 8;
    records.vector = true;
    log.ring = space<uint32_t>(1024 * 32);
    log.rows = 1024;
    log.write_index = write_index = space<int32_t>(1);
    log.slot_runs = space<uint64_t>(1);
    log.kernel_runs = space<uint64_t>(1);
    context = space<uint32_t>(2);
  }

  cuda::HostSources sources(int mode) {
    geometry = {};
    geometry.page_stride = kPage * kTokenBytes;
    geometry.token_stride = kTokenBytes;
    geometry.run_bytes = kTokenBytes;
    geometry.read_bytes = mode == kvcanary::kModePartial ? 16 : kTokenBytes;
    for (int32_t& count : geometry.run_counts) count = 1;
    geometry.page_size = kPage;
    geometry.piece = 16;
    source = {kv, 0};
    if (mode == kvcanary::kModeNone) return {{nullptr, nullptr, 0}, 0, scratch};
    return {{&source, &geometry, 1}, 1, scratch};
  }

  int32_t reported() const {
    int32_t out = 0;
    must(cudaMemcpy(&out, write_index, 4, cudaMemcpyDeviceToHost), "copy");
    return out;
  }
};

kvcanary::WriteArgs write_args(Pool& pool, int64_t requests, int64_t tokens, const IntArray& locations) {
  std::vector<int32_t> offsets, positions, ids;
  for (int64_t r = 0; r <= requests; ++r) offsets.push_back(static_cast<int32_t>(r * tokens));
  for (int64_t i = 0; i < requests * tokens; ++i) positions.push_back(static_cast<int32_t>(i % tokens)), ids.push_back(static_cast<int32_t>(i));
  kvcanary::WriteArgs a;
  a.records = pool.records;
  a.slots = pool.slots;
  a.log = pool.log;
  a.context.values = pool.context;
  a.write_offsets = ints(offsets);
  a.seed_slots = ints(std::vector<int32_t>(static_cast<size_t>(requests), -1));
  a.num_valid_reqs = upload(std::vector<int32_t>{static_cast<int32_t>(requests)});
  a.input_ids = ints(ids);
  a.positions = ints(positions);
  a.out_cache_loc = locations;
  a.chain_position_assert = space<int32_t>(1);
  a.verdict = space<int32_t>(requests);
  a.capacity = requests;
  a.tokens = requests * tokens;
  a.extended = true;
  return a;
}

void bench_verify(cudaStream_t stream, int64_t slots) {
  Pool pool(slots);
  std::mt19937 random(1);
  std::vector<int32_t> pages(static_cast<size_t>(slots / kPage)), table;
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  for (const int32_t page : pages) {
    for (int32_t place = 0; place < kPage; ++place) table.push_back(page * static_cast<int32_t>(kPage) + place);
  }
  const IntArray rows_table = ints(table), block_table = ints(pages);
  uint32_t* sink = space<uint32_t>(1);
  const double ceiling = microseconds(stream, [&] {
    gather<<<132 * 4, 512, 0, stream>>>(reinterpret_cast<const uint4*>(pool.kv), static_cast<const int32_t*>(rows_table.data), slots, sink);
    return cudaGetLastError();
  });
  std::printf("gather of %lld rows: %.1f us, %.0f GB/s\n", static_cast<long long>(slots), ceiling, 1e-3 * slots * kTokenBytes / ceiling);
  const char* names[] = {"NONE", "PARTIAL", "ALL"};
  uint64_t* hashes = space<uint64_t>(2 * slots);
  for (int mode = 0; mode < 3; ++mode) {
    for (const int64_t requests : {kRequests, slots / 32}) {
      if (mode > 0 && requests != kRequests) continue;
      const int64_t length = slots / requests;
      kvcanary::WriteArgs w = write_args(pool, requests, length, rows_table);
      cuda::HostSources sources = pool.sources(mode);
      w.sources = sources.set;
      must(cuda::write(stream, w, {hashes, nullptr, reinterpret_cast<uint32_t*>(hashes + w.tokens)}, sources), "write");
      std::vector<int32_t> rows(static_cast<size_t>(requests));
      std::iota(rows.begin(), rows.end(), 0);
      kvcanary::VerifyArgs a;
      a.records = pool.records;
      a.slots = slots;
      a.sources = sources.set;
      a.log = pool.log;
      a.context.values = pool.context;
      a.req_pool_indices = ints(rows);
      a.verdict = space<int32_t>(requests);
      a.first_bad_position = space<int32_t>(requests);
      a.unattested = space<int32_t>(requests);
      a.first_unattested_position = space<int32_t>(requests);
      a.batch_size = requests;
      a.extended = true;
      kvcanary::RequestBatch b;
      b.req_pool_indices = a.req_pool_indices;
      b.prefix_lens = ints(std::vector<int32_t>(static_cast<size_t>(requests), static_cast<int32_t>(length)));
      b.step = pool.context;
      int64_t* offsets = space<int64_t>(requests + 1);
      if (requests == kRequests) {
        std::vector<int32_t> positions, previous, owners;
        for (int64_t i = 0; i < slots; ++i) {
          positions.push_back(static_cast<int32_t>(i % length));
          previous.push_back(i % length == 0 ? -1 : table[static_cast<size_t>(i - 1)]);
          owners.push_back(static_cast<int32_t>(i / length));
        }
        cuda::PlannedEntries e;
        e.slot_indices = rows_table;
        e.expected_tokens = ints(std::vector<int32_t>(static_cast<size_t>(slots), -1));
        e.expected_positions = ints(positions);
        e.prev_slot_indices = ints(previous);
        e.batch_rows = ints(owners);
        e.num_valid = upload(std::vector<int32_t>{static_cast<int32_t>(slots)});
        e.enable = upload(std::vector<int32_t>{1});
        e.row_status = space<int32_t>(requests);
        const double us = microseconds(stream, [&] { return cuda::verify(stream, a, e, sources); });
        std::printf("verify %s, %lld x %lld: %.1f us%s\n", names[mode], static_cast<long long>(requests), static_cast<long long>(length), us,
                    pool.reported() != 0 ? " REPORTED" : "");
      }
      for (const int kind : {kvcanary::kTableRows, kvcanary::kTableBlocks}) {
        b.kind = kind;
        b.table_rows = requests;
        b.table = kind == kvcanary::kTableRows ? rows_table : block_table;
        b.table_width = kind == kvcanary::kTableRows ? length : length / kPage;
        b.page_size = kind == kvcanary::kTableRows ? 1 : kPage;
        for (const int64_t stride : {1, 4}) {
          if (stride > 1 && kind == kvcanary::kTableBlocks) continue;
          b.stride = stride;
          const double us = microseconds(stream, [&] { return cuda::verify_fused(stream, a, b, offsets, sources); });
          std::printf("verify_fused %s, %lld x %lld, %s, stride %lld: %.1f us%s", names[mode], static_cast<long long>(requests),
                      static_cast<long long>(length), kind == kvcanary::kTableRows ? "rows" : "blocks", static_cast<long long>(stride), us,
                      pool.reported() != 0 ? " REPORTED" : "");
          if (mode == 2) std::printf(", %.2f of the gather", ceiling / us / static_cast<double>(stride));
          std::printf("\n");
        }
      }
    }
  }
}

void bench_write(cudaStream_t stream, int64_t requests, int64_t tokens, int64_t slots) {
  Pool pool(slots);
  std::mt19937 random(2);
  std::vector<int32_t> locations(static_cast<size_t>(slots));
  std::iota(locations.begin(), locations.end(), 0);
  std::shuffle(locations.begin(), locations.end(), random);
  locations.resize(static_cast<size_t>(requests * tokens));
  kvcanary::WriteArgs w = write_args(pool, requests, tokens, ints(locations));
  uint64_t* hashes = space<uint64_t>(4 * w.tokens + 64);
  const char* names[] = {"NONE", "PARTIAL", "ALL"};
  for (int mode = 0; mode < 3; ++mode) {
    cuda::HostSources sources = pool.sources(mode);
    w.sources = sources.set;
    const double us = microseconds(stream, [&] { return cuda::write(stream, w, {hashes, nullptr, reinterpret_cast<uint32_t*>(hashes + w.tokens)}, sources); });
    std::printf("write %s, %lld x %lld: %.1f us%s\n", names[mode], static_cast<long long>(requests), static_cast<long long>(tokens), us,
                pool.reported() != 0 ? " REPORTED" : "");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t slots = int64_t{1} << (argc > 1 ? std::atoi(argv[1]) : 20);
  cudaStream_t stream = nullptr;
  must(cudaStreamCreate(&stream), "stream");
  bench_verify(stream, slots);
  bench_write(stream, 1, 8192, 1 << 17);
  bench_write(stream, 64, 128, 1 << 17);
  bench_write(stream, 256, 1, 1 << 17);
  return 0;
}
