// Random cases on the CPU kernels, checked against the restated contract; meant to be built with sanitizers (build.sh).
#include "driver.h"
#include "run_cpu.h"

// Read by the sanitizers, each of which has its own: all end in abort(), so that one signal handler can name the case.
extern "C" {
const char* __asan_default_options() { return "abort_on_error=1"; }
const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
const char* __tsan_default_options() { return "abort_on_error=1:halt_on_error=1"; }
}

int main(int argc, char** argv) { return kvtest::run_cases(kvtest::parse_options(argc, argv), kvtest::check_on_cpu); }
