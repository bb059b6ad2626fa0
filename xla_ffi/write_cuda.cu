// write on CUDA, one kernel: some blocks hash the tokens' real KV, meanwhile a block a request runs the chain; it stores a round of tokens
// once their hashes are there.
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

constexpr int kBlockThreads = 2 * kWarp;  // of a request's block: one warp hashes the chain, one loads and stores
constexpr int kBlocksPerSm = 3;           // with stages in shared memory
constexpr int kLightBlocksPerSm = 16;     // without
// So few tokens are hashed by their request's own block, which spares the way from block to block.
constexpr int64_t kFewTokens = 1024;
constexpr int kFewThreads = 3 * kWarp;
constexpr int kFewBlocksPerSm = 5;

// What blocks that hash tell those that store; `hashes` is null if no source is read.
struct TokenHashes {
  uint64_t* hashes;    // [tokens]
  uint32_t* tags;      // [tokens, sources] or null
  uint32_t* progress;  // [1 + groups of 32 tokens]: blocks that have started, tokens of each group whose hashes are there
  int32_t sources;
  int32_t hash_blocks;

  __device__ uint32_t* group(int64_t i) const { return progress + 1 + i / kWarp; }
};

// Hashes the tokens of warp `warp` of `warps`.
template <bool kStaged>
__device__ void hash_share(const WriteArgs& a, const TokenHashes& out, const DeviceSources& sources, Stager<FewSlots>& stager, int64_t warp,
                           int64_t warps) {
  const int lane = threadIdx.x % kWarp;
  const int lanes_log2 = lanes_log2_for(sources.count, a.tokens, warps * kWarp);
  const int64_t per_round = kWarp >> lanes_log2;
  const bool leads = (lane & ((1 << lanes_log2) - 1)) == 0;
  for (int64_t first = warp * per_round; first < a.tokens; first += warps * per_round) {
    const int64_t i = first + (lane >> lanes_log2);
    const int64_t slot = i < a.tokens ? a.out_cache_loc[i] : -1;
    const bool store = classify(a, slot) == WriteClass::kStore;
    uint64_t combined = 0;
    fold_slot_sources<kStaged>(sources, lanes_log2, store ? static_cast<int32_t>(slot) : -1, -1, stager, [](int32_t) { return true; },
                               [&](int32_t k, uint64_t hash, const SourceGeometry& g) {
                                 combined = combine_source(combined, hash, g);
                                 if (out.tags != nullptr && leads) out.tags[i * out.sources + k] = source_tag(hash);
                               });
    if (store && leads) out.hashes[i] = combined;
    __threadfence();
    __syncwarp();
    const int64_t done = a.tokens - first < per_round ? a.tokens - first : per_round;
    if (lane == 0) atomicAdd(out.group(first), static_cast<uint32_t>(done));
  }
}

// Hashes as a request's block finds them that other blocks made.
struct FarHashes {
  const WriteArgs& a;
  const TokenHashes& from;

  __device__ void start(const WriteSegment&) {}
  // Waits for those of tokens [first, last), at most 32. The whole warp calls it.
  __device__ void await(int64_t first, int64_t last) const {
    if (from.hashes == nullptr || first >= last) return;
    const int lane = threadIdx.x % kWarp;
    const int64_t at = lane == 0 ? first : last - 1;  // they lie in two groups at most
    if (lane < 2) {
      const int64_t begin = at / kWarp * kWarp;
      const uint32_t wanted = static_cast<uint32_t>(a.tokens - begin < kWarp ? a.tokens - begin : kWarp);
      const volatile uint32_t* group = from.group(at);
      while (*group < wanted) __nanosleep(40);
      __threadfence();
    }
    __syncwarp();
  }
  __device__ uint64_t operator[](int64_t i) const {
    return from.hashes == nullptr ? 0 : __ldcg(reinterpret_cast<const unsigned long long*>(from.hashes + i));
  }
};

// Hashes that a warp of the same block makes: of one request after the other.
struct NearBoard {
  uint64_t hashes[kFewTokens];  // by number in the launch
  volatile uint32_t done;       // tokens of all requests so far, modulo 2^32
};

struct NearHashes {
  NearBoard& board;
  int64_t begin = 0;    // of the request
  uint32_t before = 0;   // tokens of the requests before it
  uint32_t through = 0;  // and with its own

  __device__ void start(const WriteSegment& segment) {
    begin = segment.begin;
    before = through;
    through += static_cast<uint32_t>(segment.end - segment.begin);
  }
  __device__ void await(int64_t, int64_t last) const {
    if (threadIdx.x % kWarp == 0) {
      while (board.done - before < static_cast<uint32_t>(last - begin)) __nanosleep(20);
    }
    __threadfence_block();
    __syncwarp();
  }
  __device__ uint64_t operator[](int64_t i) const { return board.hashes[i]; }
};

// Hashes the tokens of a request into the board; several lanes share a slot where there are sources and lanes enough.
template <bool kStaged>
__device__ void hash_request(const WriteArgs& a, const TokenHashes& out, const DeviceSources& sources, Stager<FewSlots>& stager,
                             const WriteSegment& segment, NearBoard& board) {
  const int lane = threadIdx.x % kWarp;
  const int lanes_log2 = lanes_log2_for(sources.count, segment.end - segment.begin, 2 * kWarp - 1);
  const bool leads = (lane & ((1 << lanes_log2) - 1)) == 0;
  const int64_t per_round = kWarp >> lanes_log2;
  for (int64_t first = segment.begin; first < segment.end; first += per_round) {
    const int64_t i = first + (lane >> lanes_log2);
    const int64_t slot = i < segment.end ? a.out_cache_loc[i] : -1;
    const bool store = classify(a, slot) == WriteClass::kStore;
    uint64_t combined = 0;
    fold_slot_sources<kStaged>(sources, lanes_log2, store ? static_cast<int32_t>(slot) : -1, -1, stager, [](int32_t) { return true; },
                               [&](int32_t k, uint64_t hash, const SourceGeometry& g) {
                                 combined = combine_source(combined, hash, g);
                                 if (out.tags != nullptr && leads) out.tags[i * out.sources + k] = source_tag(hash);
                               });
    if (store && leads) board.hashes[i] = combined;
    if (out.tags != nullptr) __threadfence();
    __threadfence_block();
    __syncwarp();
    if (lane == 0) board.done = board.done + static_cast<uint32_t>(segment.end - first < per_round ? segment.end - first : per_round);
  }
}

// The two warps that write a request wait for each other.
__device__ inline void sync_pair() { asm volatile("bar.sync 1, 64;" ::: "memory"); }

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
    a.source_tags[t.slot * hashes.sources + k] = hashes.tags == nullptr ? 0 : __ldcg(&hashes.tags[i * hashes.sources + k]);
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
template <typename Hashes>
__device__ bool finish_round(const WriteArgs& a, const TokenHashes& out, const Hashes& hashes, int64_t r, int64_t i, const Token& mine,
                             const LaneChain& place, const Provenance& stamp) {
  const int lane = threadIdx.x % kWarp;
  const bool store = mine.kind == WriteClass::kStore;
  const uint64_t real_kv_hash = store ? hashes[i] : 0;
  const bool bad = report_token(a, r, i, mine, place, real_kv_hash);
  __syncwarp();
  // Of lanes with one slot the last stores.
  const unsigned same = __match_any_sync(kFullMask, mine.slot);
  if (store && same >> lane == 1) store_token(a, out, i, mine, place.running_hash, real_kv_hash, stamp);
  __syncwarp();
  return bad;
}

// One request by the block's two warps: the first hashes, the second moves everything in and out.
template <typename Hashes>
__device__ void write_request(const WriteArgs& a, const TokenHashes& out, Hashes& hashes, int64_t r, ChainRounds& shared) {
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
      sync_pair();
      if (k < rounds) running = run_chain(shared.round[k % 2], running);
    }
    sync_pair();
    return;
  }
  const int64_t seed = a.seed_slots[r];
  bool bad = cut || (a.extended && seed_is_out_of_range(a, seed));
  if (a.extended && seed_is_out_of_range(a, seed) && lane == 0) append_row(a.log, seed_row(a, r, seed, chain.running_hash));
  const Provenance stamp = provenance(a, r);
  hashes.start(segment);
  __syncwarp();
  uint64_t stored_total = 0;
  Token done{-1, 0, 0, WriteClass::kSkip};
  Token hashed = load_token(a, segment.begin + lane, segment.end);
  unsigned done_stored = 0;
  unsigned hashed_stored = __ballot_sync(kFullMask, hashed.kind == WriteClass::kStore);
  put_inputs(shared.round[0], hashed, hashed_stored);
  for (int64_t k = 0; k <= rounds; ++k) {
    sync_pair();  // round k is loaded, round k - 1 is hashed
    const int64_t i = segment.begin + k * kWarp + lane;
    const Token next = load_token(a, i + kWarp, segment.end);
    if (k > 0) {
      const int64_t begin = segment.begin + (k - 1) * kWarp;
      hashes.await(begin, begin + kWarp < segment.end ? begin + kWarp : segment.end);
      const LaneChain place = place_in_chain(shared.round[(k - 1) % 2], done, done_stored, chain);
      if (finish_round(a, out, hashes, r, i - kWarp, done, place, stamp)) bad = true;
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
  sync_pair();
}

// Requests of block `block` of `blocks`, by its first two warps.
template <typename Hashes>
__device__ void write_requests(const WriteArgs& a, const TokenHashes& out, Hashes& hashes, int64_t block, int64_t blocks) {
  __shared__ ChainRounds shared;
  if (block == 0 && threadIdx.x == 0) {
    add_count(a.log.kernel_runs, 1);
    normalize_index(a.log);
  }
  __syncwarp();
  const int64_t requests = num_requests(a);
  for (int64_t r = block; r < a.capacity; r += blocks) {
    if (r < requests) {
      write_request(a, out, hashes, r, shared);
    } else if (threadIdx.x == 0) {
      a.verdict[r] = kNotChecked;
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads) write_chains(const __grid_constant__ WriteArgs a, const __grid_constant__ TokenHashes hashes) {
  FarHashes far{a, hashes};
  write_requests(a, hashes, far, blockIdx.x, gridDim.x);
}

// Blocks take their parts in the order in which they start: those that hash come first and wait for nobody, so whoever waits for a
// hash waits for a block that runs.
template <bool kStaged>
__global__ void __launch_bounds__(kBlockThreads) write_and_hash(const __grid_constant__ WriteArgs a, const __grid_constant__ TokenHashes hashes,
                                                                const __grid_constant__ DeviceSources sources) {
  extern __shared__ __align__(16) unsigned char stages[];
  __shared__ int64_t started;
  if (threadIdx.x == 0) started = atomicAdd(hashes.progress, 1u);
  __syncthreads();
  const int64_t block = started;
  if (block >= hashes.hash_blocks) {
    FarHashes far{a, hashes};
    return write_requests(a, hashes, far, block - hashes.hash_blocks, gridDim.x - hashes.hash_blocks);
  }
  Stager<FewSlots> stager(kStaged ? reinterpret_cast<WarpStages<FewSlots>*>(stages) + threadIdx.x / kWarp : nullptr);
  constexpr int kWarps = kBlockThreads / kWarp;
  hash_share<kStaged>(a, hashes, sources, stager, block * kWarps + threadIdx.x / kWarp, static_cast<int64_t>(hashes.hash_blocks) * kWarps);
}

// Few tokens: a third warp of each request's block hashes them.
template <bool kStaged>
__global__ void __launch_bounds__(kFewThreads) write_few(const __grid_constant__ WriteArgs a, const __grid_constant__ TokenHashes hashes,
                                                         const __grid_constant__ DeviceSources sources) {
  extern __shared__ __align__(16) unsigned char stages[];
  __shared__ NearBoard board;
  if (threadIdx.x == 0) board.done = 0;
  __syncthreads();
  if (threadIdx.x < kBlockThreads) {
    NearHashes near{board};
    return write_requests(a, hashes, near, blockIdx.x, gridDim.x);
  }
  Stager<FewSlots> stager(kStaged ? reinterpret_cast<WarpStages<FewSlots>*>(stages) : nullptr);
  const int64_t requests = num_requests(a);
  for (int64_t r = blockIdx.x; r < requests; r += gridDim.x) {
    const WriteSegment segment = write_segment(a, r);
    if (!segment.empty()) hash_request<kStaged>(a, hashes, sources, stager, segment, board);
  }
}

template <bool kStaged>
cudaError_t launch_write_few(cudaStream_t stream, const WriteArgs& args, const TokenHashes& hashes, const DeviceSources& table) {
  const size_t shared = kStaged ? sizeof(WarpStages<FewSlots>) : 0;
  if (cudaError_t e = kStaged ? allow_shared(write_few<kStaged>, shared) : cudaSuccess; e != cudaSuccess) return e;
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(args.capacity, kFewBlocksPerSm, &blocks); e != cudaSuccess) return e;
  write_few<kStaged><<<blocks, kFewThreads, shared, stream>>>(args, hashes, table);
  return cudaGetLastError();
}

template <bool kStaged>
cudaError_t launch_write(cudaStream_t stream, const WriteArgs& args, TokenHashes hashes, const DeviceSources& table) {
  const size_t shared = kStaged ? kBlockThreads / kWarp * sizeof(WarpStages<FewSlots>) : 0;
  if (cudaError_t e = kStaged ? allow_shared(write_and_hash<kStaged>, shared) : cudaSuccess; e != cudaSuccess) return e;
  const int per_sm = kStaged ? kBlocksPerSm : kLightBlocksPerSm;
  unsigned chains = 0, resident = 0;
  if (cudaError_t e = grid_blocks(args.capacity, per_sm, &chains); e != cudaSuccess) return e;
  if (cudaError_t e = grid_blocks(INT32_MAX, per_sm, &resident); e != cudaSuccess) return e;
  // Chains and as many hashing blocks as fit beside them, at least half of all.
  const int64_t lanes = args.tokens * std::min<int64_t>(std::max(table.count, 1), kWarp);
  const int64_t room = std::max<int64_t>(static_cast<int64_t>(resident) - chains, (resident + 1) / 2);
  hashes.hash_blocks = static_cast<int32_t>(std::clamp<int64_t>(ceil_div(lanes, kBlockThreads), 1, room));
  const size_t groups = static_cast<size_t>(ceil_div(args.tokens, kWarp));
  if (cudaError_t e = cudaMemsetAsync(hashes.progress, 0, (1 + groups) * sizeof(uint32_t), stream); e != cudaSuccess) return e;
  write_and_hash<kStaged><<<hashes.hash_blocks + chains, kBlockThreads, shared, stream>>>(args, hashes, table);
  return cudaGetLastError();
}

}  // namespace

cudaError_t write(cudaStream_t stream, const WriteArgs& args, const WriteScratch& scratch, const HostSources& sources) {
  TokenHashes hashes{nullptr, nullptr, nullptr, sources.set.count, 0};
  if (sources.set.count > 0 && args.tokens > 0) {
    hashes.hashes = scratch.hashes;
    hashes.tags = args.source_tags != nullptr ? scratch.tags : nullptr;
    hashes.progress = scratch.progress;
    DeviceSources table;
    if (cudaError_t e = device_sources<FewSlots::kEngine>(stream, sources, &table); e != cudaSuccess) return e;
    if (args.tokens <= kFewTokens && args.tokens <= 4 * args.capacity) {
      return table.staged ? launch_write_few<true>(stream, args, hashes, table) : launch_write_few<false>(stream, args, hashes, table);
    }
    return table.staged ? launch_write<true>(stream, args, hashes, table) : launch_write<false>(stream, args, hashes, table);
  }
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(args.capacity, kLightBlocksPerSm, &blocks); e != cudaSuccess) return e;
  write_chains<<<blocks, kBlockThreads, 0, stream>>>(args, hashes);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
