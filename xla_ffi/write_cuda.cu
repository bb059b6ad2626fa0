// write on CUDA: all tokens' real-KV hashes by the whole grid, then a block a request runs the chain and stores.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fold_cuda.cuh"
#include "kernels_cuda.h"
#include "launch_cuda.cuh"
#include "log_cuda.cuh"
#include "sources_cuda.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kDirectThreads = 256;
constexpr int kStagedThreads = 128;
constexpr int kChainThreads = 2 * kWarp;  // one warp hashes, one loads and stores

// Where the hashes of the tokens' slots lie between the two kernels; `hashes` is null if no source is read.
struct TokenHashes {
  uint64_t* hashes;  // [tokens]
  uint32_t* tags;    // [tokens, sources] or null
  int32_t sources;
};

template <typename Stages>
__device__ void hash_share(const WriteArgs& a, const TokenHashes& out, const DeviceSources& sources, Stages* stages) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int lanes_log2 = lanes_log2_for(sources.count, a.tokens, warps * kWarp);
  const int64_t per_round = kWarp >> lanes_log2;
  const bool leads = (lane & ((1 << lanes_log2) - 1)) == 0;
  for (int64_t first = warp * per_round; first < a.tokens; first += warps * per_round) {
    const int64_t i = first + (lane >> lanes_log2);
    const int64_t slot = i < a.tokens ? a.out_cache_loc[i] : -1;
    const bool store = classify(a, slot) == WriteClass::kStore;
    uint64_t combined = 0;
    fold_slot_sources(sources, lanes_log2, store ? static_cast<int32_t>(slot) : -1, stages, [](int32_t) { return true; },
                      [&](int32_t k, uint64_t hash, const SourceGeometry& g) {
                        combined = combine_source(combined, hash, g);
                        if (out.tags != nullptr && leads) out.tags[i * out.sources + k] = source_tag(hash);
                      });
    if (store && leads) out.hashes[i] = combined;
  }
}

__global__ void __launch_bounds__(kDirectThreads)
    hash_direct(const __grid_constant__ WriteArgs a, const __grid_constant__ TokenHashes out, const __grid_constant__ DeviceSources sources) {
  hash_share<DeepStages>(a, out, sources, nullptr);
}

template <typename Stages>
__global__ void __launch_bounds__(kStagedThreads)
    hash_staged(const __grid_constant__ WriteArgs a, const __grid_constant__ TokenHashes out, const __grid_constant__ DeviceSources sources) {
  extern __shared__ __align__(16) unsigned char shared[];
  hash_share(a, out, sources, reinterpret_cast<Stages*>(shared) + threadIdx.x / kWarp);
}

cudaError_t launch_hash(cudaStream_t stream, const WriteArgs& args, const TokenHashes& out, const HostSources& sources) {
  DeviceSources table;
  if (cudaError_t e = device_sources(stream, sources, &table); e != cudaSuccess) return e;
  const int64_t lanes = args.tokens * std::min<int64_t>(std::max(table.count, 1), kWarp);
  unsigned blocks = 0;
  if (table.staged) {
    return launch_staged(
        stream, lanes, kStagedThreads, [](auto* stages) { return hash_staged<std::remove_pointer_t<decltype(stages)>>; }, args, out, table);
  } else {
    if (cudaError_t e = grid_blocks(ceil_div(lanes, kDirectThreads), 8, &blocks); e != cudaSuccess) return e;
    hash_direct<<<blocks, kDirectThreads, 0, stream>>>(args, out, table);
  }
  return cudaGetLastError();
}

// One token as a lane holds it.
struct Token {
  int64_t slot;
  uint64_t token;
  uint64_t position;
  WriteClass kind;
};

__device__ Token load_token(const WriteArgs& a, int64_t i, int64_t end) {
  if (i >= end) return {-1, 0, 0, WriteClass::kSkip};
  const int64_t slot = a.out_cache_loc[i];
  return {slot, static_cast<uint64_t>(a.input_ids[i]), static_cast<uint64_t>(a.positions[i]), classify(a, slot)};
}

// What a lane needs to know of the chain at its token.
struct LaneChain {
  uint64_t running_hash;
  uint64_t prev_position;
  bool wrong_position;
};

struct alignas(16) ChainInput {
  uint64_t token;
  uint64_t position;
};

// 32 tokens on their way through the chain: those that are stored, and the running hash before each (and after the last).
struct ChainRound {
  ChainInput inputs[kWarp];
  uint64_t running[kWarp + 1];
  int32_t count;
};

// Two rounds: while one warp hashes one, the other stores the round before and loads the round after.
struct ChainRounds {
  ChainRound round[2];
};

// The loop that a long prefill waits for: nothing but the hash, all else is the other warp's work.
__device__ uint64_t run_chain(ChainRound& round, uint64_t running) {
  const int count = round.count;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    const ChainInput input = round.inputs[j];
    round.running[j] = running;
    running = mix3(running, input.token, input.position);
  }
  round.running[count] = running;
  return running;
}

__device__ void put_inputs(ChainRound& round, const Token& mine, unsigned stored) {
  const int lane = threadIdx.x % kWarp;
  if (stored >> lane & 1) round.inputs[__popc(stored & ((1u << lane) - 1))] = {mine.token, mine.position};
  if (lane == 0) round.count = __popc(stored);
}

// The chain at a lane's token, once its round is hashed; moves the chain's position past the round.
__device__ LaneChain place_in_chain(const ChainRound& round, const Token& mine, unsigned stored, Chain& chain) {
  const int rank = __popc(stored & ((1u << (threadIdx.x % kWarp)) - 1));  // stored tokens before mine
  LaneChain place{round.running[rank], rank > 0 ? round.inputs[rank - 1].position : chain.prev_position, false};
  place.wrong_position = chain.assert_position && (rank > 0 || chain.position_known) && mine.position != place.prev_position + 1;
  if (stored != 0) {
    chain.prev_position = round.inputs[round.count - 1].position;
    chain.position_known = true;
  }
  return place;
}

__device__ void store_token(const WriteArgs& a, const TokenHashes& hashes, int64_t i, const Token& t, uint64_t running_hash,
                            uint64_t real_kv_hash, const Provenance& stamp) {
  store_record(a.records, t.slot, {t.token, t.position, running_hash, real_kv_hash}, stamp);
  if (a.source_tags == nullptr) return;
  for (int32_t k = 0; k < hashes.sources; ++k) {
    a.source_tags[t.slot * hashes.sources + k] = hashes.tags == nullptr ? 0 : hashes.tags[i * hashes.sources + k];
  }
}

// Rows of one lane's token; true if there was any.
__device__ bool report_token(const WriteArgs& a, int64_t r, int64_t i, const Token& t, const LaneChain& chain, uint64_t real_kv_hash) {
  if (t.kind == WriteClass::kSkip) return false;
  const uint32_t reasons = input_reasons(a, i);
  if (t.kind == WriteClass::kOutOfRange) {
    if (a.extended) append_row(a.log, input_row(a, r, i, reasons | kSlotOutOfRange, chain.running_hash, 0));
    return a.extended;
  }
  if (reasons != 0) append_row(a.log, input_row(a, r, i, reasons, chain.running_hash, real_kv_hash));
  if (chain.wrong_position) append_row(a.log, chain_position_row(a, r, i, chain.running_hash, chain.prev_position, real_kv_hash));
  return reasons != 0 || chain.wrong_position;
}

// Stores and reports a round that is hashed; true if a row was reported.
__device__ bool finish_round(const WriteArgs& a, const TokenHashes& hashes, int64_t r, int64_t i, const Token& mine, const LaneChain& place,
                             const Provenance& stamp) {
  const int lane = threadIdx.x % kWarp;
  const bool store = mine.kind == WriteClass::kStore;
  const uint64_t real_kv_hash = store && hashes.hashes != nullptr ? hashes.hashes[i] : 0;
  const bool bad = report_token(a, r, i, mine, place, real_kv_hash);
  __syncwarp();
  // Of lanes with one slot the last stores.
  const unsigned same = __match_any_sync(kFullMask, mine.slot);
  if (store && same >> lane == 1) store_token(a, hashes, i, mine, place.running_hash, real_kv_hash, stamp);
  __syncwarp();
  return bad;
}

// One request by the block's two warps: the first hashes, the second moves everything in and out.
__device__ void write_request(const WriteArgs& a, const TokenHashes& hashes, int64_t r, ChainRounds& shared) {
  const int lane = threadIdx.x % kWarp;
  const bool hashing = threadIdx.x < kWarp;
  const WriteSegment segment = write_segment(a, r);
  const bool cut = a.extended && segment.status != 0;
  if (cut && threadIdx.x == kWarp) append_row(a.log, segment_row(a, r));
  if (segment.empty()) {
    if (threadIdx.x == kWarp) a.verdict[r] = cut ? kBad : kNotChecked;
    return;
  }
  Chain chain = start_chain(a, r);
  const int64_t rounds = (segment.end - segment.begin + kWarp - 1) / kWarp;
  if (hashing) {
    uint64_t running = chain.running_hash;
    for (int64_t k = 0; k <= rounds; ++k) {
      __syncthreads();
      if (k < rounds) running = run_chain(shared.round[k % 2], running);
    }
    __syncthreads();
    return;
  }
  const int64_t seed = a.seed_slots[r];
  bool bad = cut || (a.extended && seed_is_out_of_range(a, seed));
  if (a.extended && seed_is_out_of_range(a, seed) && lane == 0) append_row(a.log, seed_row(a, r, seed, chain.running_hash));
  const Provenance stamp = provenance(a, r);
  __syncwarp();
  uint64_t stored_total = 0;
  Token done{-1, 0, 0, WriteClass::kSkip};
  Token hashed = load_token(a, segment.begin + lane, segment.end);
  unsigned done_stored = 0;
  unsigned hashed_stored = __ballot_sync(kFullMask, hashed.kind == WriteClass::kStore);
  put_inputs(shared.round[0], hashed, hashed_stored);
  for (int64_t k = 0; k <= rounds; ++k) {
    __syncthreads();  // round k is loaded, round k - 1 is hashed
    const int64_t i = segment.begin + k * kWarp + lane;
    const Token next = load_token(a, i + kWarp, segment.end);
    if (k > 0) {
      const LaneChain place = place_in_chain(shared.round[(k - 1) % 2], done, done_stored, chain);
      if (finish_round(a, hashes, r, i - kWarp, done, place, stamp)) bad = true;
      stored_total += __popc(done_stored);
    }
    done = hashed;
    done_stored = hashed_stored;
    hashed = next;
    hashed_stored = __ballot_sync(kFullMask, next.kind == WriteClass::kStore);
    put_inputs(shared.round[(k + 1) % 2], hashed, hashed_stored);
    __syncwarp();
  }
  bad = __any_sync(kFullMask, bad);
  if (lane == 0) {
    a.verdict[r] = bad ? kBad : stored_total > 0 ? kOk : kNotChecked;
    if (stored_total > 0) add_count(a.log.slot_runs, stored_total);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kChainThreads) write_chains(const __grid_constant__ WriteArgs a, const __grid_constant__ TokenHashes hashes) {
  __shared__ ChainRounds shared;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    add_count(a.log.kernel_runs, 1);
    normalize_index(a.log);
  }
  __syncwarp();
  const int64_t requests = num_requests(a);
  for (int64_t r = blockIdx.x; r < a.capacity; r += gridDim.x) {
    if (r < requests) {
      write_request(a, hashes, r, shared);
    } else if (threadIdx.x == 0) {
      a.verdict[r] = kNotChecked;
    }
  }
}

}  // namespace

cudaError_t write(cudaStream_t stream, const WriteArgs& args, uint64_t* token_hashes, uint32_t* token_tags, const HostSources& sources) {
  TokenHashes hashes{nullptr, nullptr, sources.set.count};
  if (sources.set.count > 0 && args.tokens > 0) {
    hashes.hashes = token_hashes;
    hashes.tags = args.source_tags != nullptr ? token_tags : nullptr;
    if (cudaError_t e = launch_hash(stream, args, hashes, sources); e != cudaSuccess) return e;
  }
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(args.capacity, 16, &blocks); e != cudaSuccess) return e;
  write_chains<<<blocks, kChainThreads, 0, stream>>>(args, hashes);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
