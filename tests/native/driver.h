// The loop of a driver: arguments, seeds, failures, and the seed of a case that kills the process.
#ifndef KVCANARY_TESTS_DRIVER_H_
#define KVCANARY_TESTS_DRIVER_H_

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "case.h"
#include "cases.h"
#include "check.h"

namespace kvtest {

struct Options {
  uint64_t seed = 1;
  int64_t cases = 2000;
  const char* op = nullptr;  // only cases of this op
  int64_t giant_one_in = 0;  // one case in so many fills a large device
  int64_t most_failures = 10;
};

inline uint64_t current_seed = 0;
inline const char* current_op = "";

// Under a sanitizer every end is an abort (driver_cpu.cc); it handles the other signals itself.
inline void name_the_case_that_kills() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const auto numbers = {SIGABRT};
#else
  const auto numbers = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE};
#endif
  for (const int number : numbers) {
    std::signal(number, [](int n) {
      std::fprintf(stderr, "DIED seed=%llu op=%s\n", static_cast<unsigned long long>(current_seed), current_op);
      std::signal(n, SIG_DFL);
      std::raise(n);
    });
  }
}

inline Options parse_options(int argc, char** argv, Options out = {}) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--seed") {
      out.seed = std::strtoull(argv[i + 1], nullptr, 0);
    } else if (name == "--cases") {
      out.cases = std::strtoll(argv[i + 1], nullptr, 0);
    } else if (name == "--op") {
      out.op = argv[i + 1];
    } else if (name == "--giant-one-in") {
      out.giant_one_in = std::strtoll(argv[i + 1], nullptr, 0);
    } else {
      std::fprintf(stderr, "unknown argument %s\n", name.c_str());
      std::exit(2);
    }
  }
  if (argc % 2 == 0) {
    std::fprintf(stderr, "usage: %s [--seed FIRST] [--cases N] [--giant-one-in N] [--op plan|verify|verify_fused|write|scatter]\n",
                 argv[0]);
    std::exit(2);
  }
  return out;
}

// `check_case(case, expected, coverage)` returns what is wrong. Case i has the seed `seed + i`. Returns the exit code.
template <typename CheckCase>
int run_cases(const Options& options, const CheckCase& check_case) {
  name_the_case_that_kills();
  Coverage coverage;
  int64_t passed = 0, failed = 0;
  for (int64_t i = 0; i < options.cases && failed < options.most_failures; ++i) {
    current_seed = options.seed + static_cast<uint64_t>(i);
    current_op = "(being made)";
    std::string found;
    try {
      const Case c = make_case(current_seed, options.giant_one_in);
      current_op = kOpNames[static_cast<size_t>(c.op)];
      if (options.op != nullptr && std::strcmp(options.op, current_op) != 0) continue;
      const Expected expected = expect(c);
      coverage.add(c, expected);
      found = check_case(c, expected, coverage);
    } catch (const std::exception& e) {
      found = std::string("exception: ") + e.what();
    }
    if (found.empty()) {
      ++passed;
    } else {
      ++failed;
      std::printf("FAILED seed=%llu op=%s: %s\n", static_cast<unsigned long long>(current_seed), current_op, found.c_str());
    }
  }
  coverage.print();
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(passed), static_cast<long long>(failed));
  return failed == 0 ? 0 : 1;
}

}  // namespace kvtest

#endif  // KVCANARY_TESTS_DRIVER_H_
