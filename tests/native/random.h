// Reproducible random numbers, and integers chosen to do harm: edges of an array, of 32 bits, of 64 bits.
#ifndef KVCANARY_TESTS_RANDOM_H_
#define KVCANARY_TESTS_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

namespace kvtest {

inline constexpr int64_t kMin32 = std::numeric_limits<int32_t>::min();
inline constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
inline constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

// The same sequence on every machine, which the standard distributions do not promise.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0xD1B54A32D192ED03ull) { next(); }

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t x = state_;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    return x ^ (x >> 32);
  }
  // In [0, n); n >= 1.
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  // In [low, high].
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
  }

 private:
  uint64_t state_;
};

// How many elements of an array are hostile.
enum class Manner { kClean, kMixed, kWild };

// A number that an index into [0, n) should not be, or only just.
inline int64_t hostile_value(Random& random, int64_t n, bool wide) {
  int64_t value = 0;
  switch (random.below(wide ? 6 : 4)) {
    case 0:
      value = random.pick<int64_t>({-2, -1, 0, 1, n - 1, n, n + 1, -n});
      break;
    case 1:
      value = random.pick<int64_t>({kMin32, kMin32 + 1, kMax32 - 1, kMax32});
      break;
    case 2:
      value = random.between(-8, n + 8);
      break;
    case 3:
      value = static_cast<int32_t>(random.next());
      break;
    case 4:
      // With neighbours of 2^31 and 2^32, which are in range once they are cut to 32 bits.
      value = random.pick<int64_t>({kMin64, kMin64 + 1, kMax64 - 1, kMax64, kMax32 + 1, kMin32 - 1, int64_t{1} << 32,
                                    (int64_t{1} << 32) + random.below(n + 1), -(int64_t{1} << 32)});
      break;
    default:
      value = static_cast<int64_t>(random.next());
      break;
  }
  return wide ? value : static_cast<int32_t>(static_cast<uint32_t>(value));
}

// An index into [0, n), hostile as often as the manner says; -1 where nothing is in range.
inline int64_t index_value(Random& random, int64_t n, bool wide, Manner manner) {
  const bool hostile = manner == Manner::kWild ? !random.one_in(4) : manner == Manner::kMixed && random.one_in(10);
  if (hostile) return hostile_value(random, n, wide);
  return n > 0 ? random.below(n) : -1;
}

}  // namespace kvtest

#endif  // KVCANARY_TESTS_RANDOM_H_
