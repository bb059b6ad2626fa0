#!/bin/sh
# Builds a driver of the kernels: build.sh cpu-sanitized|cpu-threads|cpu|cuda OUTPUT_FOLDER
# From the environment: CXX, NVCC, KVCANARY_CUDA_ARCH (native, or sm_90 and the like), XLA_FFI_DIR (another copy of the kernels).
# The CUDA driver also runs under `compute-sanitizer --tool memcheck` or `--tool initcheck`; give it few cases there.
set -eu
if [ $# -ne 2 ]; then
  sed -n 's/^# Builds a driver of the kernels: /usage: /p' "$0" >&2
  exit 2
fi
kind=$1
out=$2
here=$(cd "$(dirname "$0")" && pwd)
kernels=${XLA_FFI_DIR:-$here/../../xla_ffi}
cxx="${CXX:-g++} -std=c++17 -Wall -Wextra -I$kernels -I$here"
mkdir -p "$out"

# Kernels and the driver side by side; the driver takes about as long as all kernels.
build_cpu() {
  $cxx "$@" -c "$here/driver_cpu.cc" -o "$out/driver_cpu.o" &
  driver=$!
  for stem in plan_cpu verify_cpu write_cpu scatter_cpu; do
    $cxx "$@" -c "$kernels/$stem.cc" -o "$out/$stem.o"
  done
  wait $driver
  $cxx "$@" "$out"/driver_cpu.o "$out"/plan_cpu.o "$out"/verify_cpu.o "$out"/write_cpu.o "$out"/scatter_cpu.o -pthread -o "$out/driver_cpu"
}

case $kind in
  cpu-sanitized) build_cpu -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all ;;
  cpu-threads) build_cpu -O1 -g1 -fsanitize=thread ;;
  cpu) build_cpu -O2 ;;
  cuda)
    nvcc="${NVCC:-nvcc} -std=c++17 -O2 -lineinfo --expt-relaxed-constexpr -arch=${KVCANARY_CUDA_ARCH:-native} -Xcompiler=-Wall,-Wextra
      -I$kernels -I$here"
    for stem in plan_cpu verify_cpu write_cpu scatter_cpu; do
      $cxx -O2 -c "$kernels/$stem.cc" -o "$out/$stem.o"
    done
    $nvcc --threads=2 "$here/driver_cuda.cu" "$kernels"/plan_cuda.cu "$kernels"/verify_cuda.cu "$kernels"/write_cuda.cu \
      "$kernels"/scatter_cuda.cu "$out"/plan_cpu.o "$out"/verify_cpu.o "$out"/write_cpu.o "$out"/scatter_cpu.o -o "$out/driver_cuda"
    ;;
  *)
    echo "build.sh: unknown kind $kind" >&2
    exit 2
    ;;
esac
