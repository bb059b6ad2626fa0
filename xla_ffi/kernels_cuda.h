// Entry points of the CUDA kernels: they only launch, on the given stream; no allocation, no synchronisation.
#ifndef KVCANARY_KERNELS_CUDA_H_
#define KVCANARY_KERNELS_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "int_array.h"
#include "plan_output.h"
#include "scatter_args.h"
#include "source.h"
#include "table.h"
#include "verify_entry.h"
#include "write_entry.h"

namespace kvcanary::cuda {

// A launch's source table as the host has it, and device memory that may hold it.
struct HostSources {
  SourceSet set;
  size_t geometries = 0;
  void* scratch = nullptr;
};

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

// Device memory for the hashes of a write's tokens.
struct WriteScratch {
  uint64_t* hashes = nullptr;    // [tokens]
  uint32_t* tags = nullptr;      // [tokens, sources], used with source tags
  uint32_t* progress = nullptr;  // [write_progress_words(tokens)]
};

inline int64_t write_progress_words(int64_t tokens) { return 1 + (tokens + 31) / 32; }

cudaError_t plan(cudaStream_t stream, const RequestBatch& batch, const PlanOutput& out);
cudaError_t verify(cudaStream_t stream, const VerifyArgs& args, const PlannedEntries& entries, const HostSources& sources);
// entry_offsets: scratch int64 [bs + 1].
cudaError_t verify_fused(cudaStream_t stream, const VerifyArgs& args, const RequestBatch& batch, int64_t* entry_offsets,
                         const HostSources& sources);
cudaError_t write(cudaStream_t stream, const WriteArgs& args, const WriteScratch& scratch, const HostSources& sources);
cudaError_t scatter(cudaStream_t stream, const ScatterArgs& args);

}  // namespace kvcanary::cuda

#endif  // KVCANARY_KERNELS_CUDA_H_
