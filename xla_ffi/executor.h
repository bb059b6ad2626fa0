// How CPU kernels spread work: independent chunks, run by whoever the caller provides.
#ifndef KVCANARY_EXECUTOR_H_
#define KVCANARY_EXECUTOR_H_

#include <cstdint>
#include <functional>

namespace kvcanary {

class Executor {
 public:
  virtual ~Executor() = default;
  // Runs body(i) for every i in [0, chunks), in any order, possibly at once; returns when all are done.
  virtual void run(int64_t chunks, const std::function<void(int64_t)>& body) = 0;
};

class SerialExecutor final : public Executor {
 public:
  void run(int64_t chunks, const std::function<void(int64_t)>& body) override {
    for (int64_t i = 0; i < chunks; ++i) body(i);
  }
};

}  // namespace kvcanary

#endif  // KVCANARY_EXECUTOR_H_
