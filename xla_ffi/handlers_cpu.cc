// XLA FFI handlers of the CPU kernels: decode, check, call one kernel.
#include "handlers_cpu.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "ffi_ops.h"
#include "kernels_cpu.h"

namespace kvcanary {
namespace {

// Spreads chunks over XLA's thread pool. The caller works too, and waits only for chunks that somebody has begun, so a pool
// without a free thread delays nothing.
class ThreadPoolExecutor final : public Executor {
 public:
  explicit ThreadPoolExecutor(ffi::ThreadPool& pool) : pool_(pool) {}

  void run(int64_t chunks, const std::function<void(int64_t)>& body) override {
    if (chunks <= 1) return SerialExecutor().run(chunks, body);
    auto work = std::make_shared<Work>();
    work->chunks = chunks;
    work->body = &body;
    const int64_t helpers = std::min(chunks, pool_.num_threads()) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([work] { work->drain(); });
    work->drain();
    std::unique_lock<std::mutex> lock(work->mutex);
    work->all_done.wait(lock, [&] { return work->done == chunks; });
    if (work->failure) std::rethrow_exception(work->failure);
  }

 private:
  struct Work {
    // A thread that comes late finds no chunk left and touches neither `body` nor anything behind it.
    void drain() {
      for (int64_t i = next.fetch_add(1); i < chunks; i = next.fetch_add(1)) {
        std::exception_ptr thrown;
        try {
          (*body)(i);
        } catch (...) {
          thrown = std::current_exception();
        }
        const std::lock_guard<std::mutex> lock(mutex);
        if (thrown && !failure) failure = thrown;
        if (++done == chunks) all_done.notify_all();
      }
    }

    std::atomic<int64_t> next{0};
    int64_t chunks = 0;
    const std::function<void(int64_t)>* body = nullptr;
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
    std::exception_ptr failure;
  };

  ffi::ThreadPool& pool_;
};

void copy_states(const Frame& frame) {
  for (const StateCopy& copy : frame.copies()) std::memcpy(copy.to, copy.from, copy.bytes);
}

// Decodes a call and runs its kernel; anything thrown (out of memory) becomes an error of the call.
template <typename Decode, typename Run>
ffi::Error handle(const char* op, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs, const Decode& decode,
                  const Run& run) {
  try {
    Frame frame(op, args, rets, attrs);
    const auto call = decode(frame);
    if (!frame.ok()) return frame.error();
    copy_states(frame);
    run(call);
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("kv-canary: ") + op + ": " + e.what());
  }
}

ffi::Error plan(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("plan", args, rets, attrs, decode_plan, [&](const PlanCall& call) {
    ThreadPoolExecutor executor(pool);
    cpu::plan(call.batch, call.out, executor);
  });
}

ffi::Error verify(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("verify", args, rets, attrs, decode_verify, [&](const VerifyCall& call) {
    ThreadPoolExecutor executor(pool);
    const cpu::PlannedEntries entries{call.slot_indices, call.expected_tokens, call.expected_positions, call.prev_slot_indices,
                                      call.batch_rows,   call.num_valid,       call.enable,             call.row_status};
    cpu::verify(call.args, entries, executor);
  });
}

ffi::Error verify_fused(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("verify_fused", args, rets, attrs, decode_verify_fused, [&](const VerifyCall& call) {
    ThreadPoolExecutor executor(pool);
    cpu::verify_fused(call.args, call.batch, executor);
  });
}

ffi::Error write(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("write", args, rets, attrs, decode_write, [&](const WriteCall& call) {
    ThreadPoolExecutor executor(pool);
    cpu::write(call.args, executor);
  });
}

ffi::Error scatter(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("scatter_req_token_ids", args, rets, attrs, decode_scatter, [&](const ScatterArgs& call) {
    ThreadPoolExecutor executor(pool);
    cpu::scatter(call, executor);
  });
}

}  // namespace

#define KVC_CPU_HANDLER(symbol, function) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs())

KVC_CPU_HANDLER(kvcanary_plan_cpu, plan);
KVC_CPU_HANDLER(kvcanary_verify_cpu, verify);
KVC_CPU_HANDLER(kvcanary_verify_fused_cpu, verify_fused);
KVC_CPU_HANDLER(kvcanary_write_cpu, write);
KVC_CPU_HANDLER(kvcanary_scatter_cpu, scatter);

}  // namespace kvcanary
