// Reads the operands, results and attributes of one custom call by name and checks each; the first error is kept.
#ifndef KVCANARY_FRAME_H_
#define KVCANARY_FRAME_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "int_array.h"
#include "spec.h"
#include "xla/ffi/api/ffi.h"

namespace kvcanary {

namespace ffi = ::xla::ffi;

// An operand or result: where it is and what it looks like.
struct BufferView {
  void* data = nullptr;
  ffi::DataType dtype = ffi::DataType::INVALID;
  std::vector<int64_t> dims;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t d : dims) n *= d;
    return n;
  }
};

// Bits of an element in memory; sub-byte types are packed, whatever the API's byte width says. 0 if unknown.
inline int64_t element_bits(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::S1:
    case ffi::DataType::U1:
      return 1;
    case ffi::DataType::S2:
    case ffi::DataType::U2:
      return 2;
    case ffi::DataType::S4:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return 4;
    case ffi::DataType::INVALID:
    case ffi::DataType::TOKEN:
      return 0;
    default:
      return static_cast<int64_t>(ffi::ByteWidth(dtype)) * 8;
  }
}

// Copies that bring a state operand into its result where the compiler did not alias the two.
struct StateCopy {
  void* to;
  const void* from;
  size_t bytes;
};

class Frame {
 public:
  Frame(const char* op, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs)
      : op_(op), args_(args), rets_(rets), attrs_(attrs) {
    if (attr("abi") != kAbi) fail("attribute abi must be " + std::to_string(kAbi));
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }
  void fail(const std::string& what) {
    if (message_.empty()) message_ = std::string("kv-canary: ") + op_ + ": " + what;
  }
  const std::vector<StateCopy>& copies() const { return copies_; }

  // --- attributes ---
  int64_t attr(const char* name) {
    ffi::ErrorOr<int64_t> value = attrs_.get<int64_t>(name);
    if (value.has_value()) return *value;
    fail(std::string("attribute ") + name + " is missing or not an int64");
    return 0;
  }
  int64_t attr_in(const char* name, int64_t low, int64_t high) {
    const int64_t value = attr(name);
    if (value >= low && value <= high) return value;
    fail(std::string("attribute ") + name + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + "], got " +
         std::to_string(value));
    return low;
  }
  bool flag(const char* name) { return attr_in(name, 0, 1) != 0; }
  ffi::Span<const int64_t> attr_array(const char* name) {
    ffi::ErrorOr<ffi::Span<const int64_t>> value = attrs_.get<ffi::Span<const int64_t>>(name);
    if (value.has_value()) return *value;
    fail(std::string("attribute ") + name + " is missing or not an int64 array");
    return {};
  }

  // --- operands, in order ---
  BufferView next_arg(const char* name) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = args_.get<ffi::AnyBuffer>(next_arg_);
    ++next_arg_;
    if (!buffer.has_value()) {
      fail(std::string("operand ") + name + " is missing");
      return {};
    }
    return view(*buffer, name);
  }
  size_t args_left() const { return args_.size() > next_arg_ ? args_.size() - next_arg_ : 0; }

  BufferView arg(const char* name, ffi::DataType dtype, const std::vector<int64_t>& dims) {
    BufferView v = next_arg(name);
    expect(v, name, dtype, dims);
    return v;
  }
  const int32_t* i32(const char* name, int64_t n) {
    return static_cast<const int32_t*>(arg(name, ffi::DataType::S32, {n}).data);
  }
  const uint32_t* u32(const char* name, int64_t n) {
    return static_cast<const uint32_t*>(arg(name, ffi::DataType::U32, {n}).data);
  }
  // Integers of any form; n < 0: any length.
  IntArray ints(const char* name, int64_t n = -1) {
    BufferView v = next_arg(name);
    return as_ints(v, name, n);
  }
  // At most n integers.
  IntArray ints_up_to(const char* name, int64_t n) {
    IntArray a = ints(name);
    if (a.size > n) fail(std::string("operand ") + name + " is longer than " + std::to_string(n));
    return a;
  }
  // A table of integers of any rank up to 2, flattened; its dims come with it.
  std::pair<IntArray, std::vector<int64_t>> table(const char* name) {
    BufferView v = next_arg(name);
    const bool wide = v.dtype == ffi::DataType::S64;
    if (ok() && ((v.dtype != ffi::DataType::S32 && !wide) || v.dims.empty() || v.dims.size() > 2)) {
      fail(std::string("operand ") + name + " must be int32 or int64 of one or two dimensions");
    }
    if (!ok()) return {IntArray{}, {0, 0}};
    return {IntArray{v.data, v.elements(), wide}, v.dims};
  }

  // --- results, in order ---
  BufferView ret(const char* name, ffi::DataType dtype, const std::vector<int64_t>& dims) {
    BufferView v = next_ret(name);
    expect(v, name, dtype, dims);
    return v;
  }
  int32_t* ret_i32(const char* name, int64_t n) { return static_cast<int32_t*>(ret(name, ffi::DataType::S32, {n}).data); }
  IntOutput ret_ints(const char* name, int64_t n, bool wide) {
    return {ret(name, wide ? ffi::DataType::S64 : ffi::DataType::S32, {n}).data, wide};
  }
  // A result that holds at least `bytes` bytes of scratch.
  BufferView ret_scratch(const char* name, int64_t bytes) {
    BufferView v = next_ret(name);
    if (ok() && (v.dtype != ffi::DataType::U32 || v.elements() * 4 < bytes)) {
      fail(std::string("result ") + name + " must be uint32 and hold " + std::to_string(bytes) + " bytes");
    }
    return v;
  }
  // The result that takes over a state operand: same type and shape, aliased or copied.
  void* ret_state(const char* name, const BufferView& operand) {
    BufferView v = ret(name, operand.dtype, operand.dims);
    if (!ok()) return nullptr;
    const int64_t bytes = (operand.elements() * element_bits(operand.dtype) + 7) / 8;
    if (v.data != operand.data && bytes > 0) copies_.push_back({v.data, operand.data, static_cast<size_t>(bytes)});
    return v.data;
  }
  void finish() {
    if (args_left() > 0) fail("too many operands");
    if (rets_.size() > next_ret_) fail("too many results");
  }

  void expect(const BufferView& v, const char* name, ffi::DataType dtype, const std::vector<int64_t>& dims) {
    if (!ok()) return;
    if (v.dtype != dtype) return fail(std::string(name) + " has the wrong element type");
    if (v.dims != dims) fail(std::string(name) + " must have shape " + text(dims) + ", got " + text(v.dims));
  }

  static std::string text(const std::vector<int64_t>& dims) {
    std::string out = "(";
    for (size_t i = 0; i < dims.size(); ++i) out += (i ? ", " : "") + std::to_string(dims[i]);
    return out + ")";
  }

  IntArray as_ints(const BufferView& v, const char* name, int64_t n) {
    if (!ok()) return {};
    IntArray a{v.data, v.dims.empty() ? 0 : v.dims[0], true};
    if (v.dtype == ffi::DataType::S32 && v.dims.size() == 1) {
      a.wide = false;
    } else if (!(v.dtype == ffi::DataType::S64 && v.dims.size() == 1) &&
               !(v.dtype == ffi::DataType::U32 && v.dims.size() == 2 && v.dims[1] == 2)) {
      fail(std::string("operand ") + name + " must be int32 [n], int64 [n] or uint32 [n, 2], got shape " + text(v.dims));
      return {};
    }
    if (n >= 0 && a.size != n) {
      fail(std::string("operand ") + name + " length must be " + std::to_string(n) + ", got " + std::to_string(a.size));
      return {};
    }
    return a;
  }

 private:
  BufferView next_ret(const char* name) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets_.get<ffi::AnyBuffer>(next_ret_);
    ++next_ret_;
    if (!buffer.has_value()) {
      fail(std::string("result ") + name + " is missing");
      return {};
    }
    return view(**buffer, name);
  }

  BufferView view(const ffi::AnyBuffer& buffer, const char* name) {
    BufferView v;
    v.data = buffer.untyped_data();
    v.dtype = buffer.element_type();
    const auto dims = buffer.dimensions();
    v.dims.assign(dims.begin(), dims.end());
    // 2^58 elements of up to 128 bits keep every byte count within int64.
    unsigned __int128 n = 1;
    for (int64_t d : v.dims) {
      if (d < 0) fail(std::string(name) + " has a negative dimension");
      n *= static_cast<uint64_t>(d);
      if (n > (static_cast<unsigned __int128>(1) << 58)) {
        fail(std::string(name) + " is too large");
        break;
      }
    }
    return v;
  }

  const char* op_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attrs_;
  size_t next_arg_ = 0;
  size_t next_ret_ = 0;
  std::string message_;
  std::vector<StateCopy> copies_;
};

}  // namespace kvcanary

#endif  // KVCANARY_FRAME_H_
