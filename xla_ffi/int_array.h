// Integer operands of either width: 32-bit, or 64-bit (int64, or uint32 pairs when x64 is off).
#ifndef KVCANARY_INT_ARRAY_H_
#define KVCANARY_INT_ARRAY_H_

#include <cstdint>

#include "host_device.h"

namespace kvcanary {

struct IntArray {
  const void* data = nullptr;
  int64_t size = 0;
  bool wide = false;

  KVC_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
  // The element, or `fallback` outside the array.
  KVC_HD int64_t get(int64_t i, int64_t fallback) const { return i >= 0 && i < size ? (*this)[i] : fallback; }
};

// Saturates, so that what was out of range as 64 bits stays out of range as 32.
KVC_HD int32_t narrow(int64_t value) {
  const int64_t top = 0x7FFFFFFF;
  return static_cast<int32_t>(value > top ? top : value < -top - 1 ? -top - 1 : value);
}

struct IntOutput {
  void* data = nullptr;
  bool wide = false;

  KVC_HD void store(int64_t i, int64_t value) const {
    if (wide) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = narrow(value);
    }
  }
  KVC_HD int64_t load(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
};

}  // namespace kvcanary

#endif  // KVCANARY_INT_ARRAY_H_
