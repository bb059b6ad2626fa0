// Running a case on the CPU kernels, with memory whose every overrun a sanitizer sees and executors that reorder and mix the chunks.
#ifndef KVCANARY_TESTS_RUN_CPU_H_
#define KVCANARY_TESTS_RUN_CPU_H_

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
#include "kernels_cpu.h"
#include "model.h"

namespace kvtest {

// One allocation an operand. Nothing but its own bytes is readable, bar up to 7 in front of a shifted one.
class HostMemory final : public Memory {
 public:
  HostMemory() = default;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() override {
    for (const Block& block : blocks_) std::free(block.start);
  }

  void* place(const void* bytes, size_t size, int shift) override {
    // Of empty operands some have no address at all.
    if (size == 0 && ++empties_ % 2 == 0) return nullptr;
    void* start = std::malloc(size + static_cast<size_t>(shift));
    if (start == nullptr) throw std::bad_alloc();
    blocks_.push_back({start, {}, shift});
    if (reinterpret_cast<uintptr_t>(start) % 16 != 0) throw std::logic_error("malloc returned memory that is not aligned to 16 bytes");
    unsigned char* data = static_cast<unsigned char*>(start) + shift;
    if (size > 0) std::memcpy(data, bytes, size);
#if defined(__SANITIZE_ADDRESS__)
    if (shift >= 8) ASAN_POISON_MEMORY_REGION(start, 8);
#endif
    return data;
  }
  void fetch(void* to, const void* from, size_t size) override { std::memcpy(to, from, size); }

  // From here on, operands placed so far must stay as they are.
  template <typename T>
  void watch(const T* data, size_t count) {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(data);
    watched_.push_back({bytes, {bytes, bytes + count * sizeof(T)}});
  }
  bool watched_are_unchanged() const {
    for (const Watched& w : watched_) {
      if (!w.copy.empty() && std::memcmp(w.data, w.copy.data(), w.copy.size()) != 0) return false;
    }
    return true;
  }

 private:
  struct Block {
    void* start;
    std::vector<unsigned char> unused;
    int shift;
  };
  struct Watched {
    const unsigned char* data;
    std::vector<unsigned char> copy;
  };
  std::vector<Block> blocks_;
  std::vector<Watched> watched_;
  int64_t empties_ = 0;
};
