// Hash arithmetic of the contract: splitmix64, the chain step, the fold of 8-byte words.
#ifndef KVCANARY_HASH_H_
#define KVCANARY_HASH_H_

#include <cstdint>

#include "host_device.h"
#include "spec.h"

namespace kvcanary {

KVC_HD constexpr uint64_t splitmix64(uint64_t x) {
  x ^= x >> 30;
  x *= kSplitMixMultiplier1;
  x ^= x >> 27;
  x *= kSplitMixMultiplier2;
  x ^= x >> 31;
  return x;
}

KVC_HD constexpr uint64_t mix3(uint64_t a, uint64_t b, uint64_t c) {
  return splitmix64(splitmix64(splitmix64(a) ^ b) ^ c);
}

// What a head record of a namespace stores as its predecessor's hash.
KVC_HD constexpr uint64_t anchor_hash(uint64_t name_space) { return splitmix64(kChainAnchor ^ name_space); }

static_assert(splitmix64(0) == 0, "splitmix64(0) is 0");
static_assert(mix3(0, 0, 0) == 0, "so is what follows a record of zeros");
static_assert(anchor_hash(0) == 0xde7fae23a9a1b716ull, "known answer of the anchor");
static_assert(mix3(0xde7fae23a9a1b716ull, 101, 0) == 0x542fe5061275a6abull, "known answer of the chain");
static_assert(splitmix64(0xf036e30b6961c78dull) == 0x6041580849e6407dull, "known answer of a combined source");

}  // namespace kvcanary

#endif  // KVCANARY_HASH_H_
