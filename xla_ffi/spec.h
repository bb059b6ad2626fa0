// Numbers, codes and names of the contract, defined once; bindings export them to Python.
#ifndef KVCANARY_SPEC_H_
#define KVCANARY_SPEC_H_

#include <cstdint>

namespace kvcanary {

// Version of operands, attributes and record layout; part of every target name.
inline constexpr int64_t kAbi = 1;

inline constexpr uint64_t kChainAnchor = 0xC0FFEE1234567890ull;
inline constexpr uint64_t kSplitMixMultiplier1 = 0xBF58476D1CE4E5B9ull;
inline constexpr uint64_t kSplitMixMultiplier2 = 0x94D049BB133111EBull;

inline constexpr int kRecordWords = 8;             // uint32 words of a plain record
inline constexpr int kProvenanceRecordWords = 16;  // with request id, step, flags, namespace
inline constexpr int kRingColumns = 16;            // 64-bit columns of a violation row
inline constexpr int kRingWords = 2 * kRingColumns;
inline constexpr int kNumLaunchTags = 12;
inline constexpr int64_t kPartialBytes = 16;
inline constexpr int64_t kInt32Max = 0x7FFFFFFF;
inline constexpr int64_t kInt64Max = 0x7FFFFFFFFFFFFFFFll;
inline constexpr int64_t kPlanInvalidSlot = -2;  // a slot whose index mapping is out of range

enum FailReason : uint32_t {
  kVerifyChainHash = 1,
  kVerifyPosition = 2,
  kVerifyRealKvHash = 4,
  kWriteToken = 8,
  kWritePosition = 16,
  kVerifyToken = 32,
  kSlotOutOfRange = 64,
  kTableOutOfRange = 128,
  kUnwritten = 256,
};

enum HashMode : int32_t { kModeNone = 0, kModePartial = 1, kModeAll = 2 };

enum Verdict : int32_t { kNotChecked = 0, kOk = 1, kBad = 2 };

enum TableKind : int32_t { kTableRows = 0, kTableBlocks = 1, kTableFlat = 2, kTableIdentity = 3 };

enum RecordFlag : uint32_t { kFlagFree = 1, kFlagAdopted = 2 };

enum Column : int {
  kColTag = 0,
  kColSlot,
  kColPosition,
  kColToken,
  kColExpectedToken,
  kColChainHash,
  kColAux,
  kColReason,
  kColBatchRow,
  kColReqPoolIdx,
  kColStep,
  kColExpectedPosition,
  kColRealKvHash,
  kColExpectedRealKvHash,
  kColFirstBadSource,
  kColShard,
};

inline constexpr char kTargetPlan[] = "kvcanary_plan_v1";
inline constexpr char kTargetVerify[] = "kvcanary_verify_v1";
inline constexpr char kTargetVerifyFused[] = "kvcanary_verify_fused_v1";
inline constexpr char kTargetWrite[] = "kvcanary_write_v1";
inline constexpr char kTargetScatter[] = "kvcanary_scatter_v1";

}  // namespace kvcanary

#endif  // KVCANARY_SPEC_H_
