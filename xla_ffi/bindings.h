// What a compiled module tells Python: its custom call targets and the contract's numbers.
#ifndef KVCANARY_BINDINGS_H_
#define KVCANARY_BINDINGS_H_

#include <nanobind/nanobind.h>

#include "spec.h"
#include "xla/ffi/api/c_api.h"

namespace kvcanary {

namespace nb = nanobind;

inline nb::capsule handler_capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

inline nb::dict spec_constants() {
  nb::dict d;
  d["ABI"] = kAbi;
  d["FFI_API_MAJOR"] = XLA_FFI_API_MAJOR;
  d["FFI_API_MINOR"] = XLA_FFI_API_MINOR;
  d["CHAIN_ANCHOR"] = kChainAnchor;
  d["SPLITMIX_MULTIPLIER_1"] = kSplitMixMultiplier1;
  d["SPLITMIX_MULTIPLIER_2"] = kSplitMixMultiplier2;
  d["RECORD_WORDS"] = kRecordWords;
  d["PROVENANCE_RECORD_WORDS"] = kProvenanceRecordWords;
  d["RING_COLUMNS"] = kRingColumns;
  d["NUM_LAUNCH_TAGS"] = kNumLaunchTags;
  d["PARTIAL_BYTES"] = kPartialBytes;
  d["PLAN_INVALID_SLOT"] = kPlanInvalidSlot;
  d["VERIFY_CHAIN_HASH"] = static_cast<uint32_t>(kVerifyChainHash);
  d["VERIFY_POSITION"] = static_cast<uint32_t>(kVerifyPosition);
  d["VERIFY_REAL_KV_HASH"] = static_cast<uint32_t>(kVerifyRealKvHash);
  d["WRITE_TOKEN"] = static_cast<uint32_t>(kWriteToken);
  d["WRITE_POSITION"] = static_cast<uint32_t>(kWritePosition);
  d["VERIFY_TOKEN"] = static_cast<uint32_t>(kVerifyToken);
  d["SLOT_OUT_OF_RANGE"] = static_cast<uint32_t>(kSlotOutOfRange);
  d["TABLE_OUT_OF_RANGE"] = static_cast<uint32_t>(kTableOutOfRange);
  d["UNWRITTEN"] = static_cast<uint32_t>(kUnwritten);
  d["FLAG_FREE"] = static_cast<uint32_t>(kFlagFree);
  d["FLAG_ADOPTED"] = static_cast<uint32_t>(kFlagAdopted);
  d["MODE_NONE"] = static_cast<int32_t>(kModeNone);
  d["MODE_PARTIAL"] = static_cast<int32_t>(kModePartial);
  d["MODE_ALL"] = static_cast<int32_t>(kModeAll);
  d["NOT_CHECKED"] = static_cast<int32_t>(kNotChecked);
  d["OK"] = static_cast<int32_t>(kOk);
  d["BAD"] = static_cast<int32_t>(kBad);
  d["TABLE_ROWS"] = static_cast<int32_t>(kTableRows);
  d["TABLE_BLOCKS"] = static_cast<int32_t>(kTableBlocks);
  d["TABLE_FLAT"] = static_cast<int32_t>(kTableFlat);
  d["TABLE_IDENTITY"] = static_cast<int32_t>(kTableIdentity);
  return d;
}

}  // namespace kvcanary

#endif  // KVCANARY_BINDINGS_H_
