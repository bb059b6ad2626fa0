// Appending rows to the log on the CPU: chunks collect, one thread merges, so rows stand in entry order.
#ifndef KVCANARY_LOG_CPU_H_
#define KVCANARY_LOG_CPU_H_

#include <cstdint>
#include <vector>

#include "violation.h"

namespace kvcanary::cpu {

// Rows of one chunk: all are counted, only as many are kept as the ring could still hold.
class RowCollector {
 public:
  explicit RowCollector(int64_t keep) : keep_(keep) {}
  void add(const ViolationRow& row) {
    if (static_cast<int64_t>(rows_.size()) < keep_) rows_.push_back(row);
    ++count_;
  }
  int64_t count() const { return count_; }
  const std::vector<ViolationRow>& rows() const { return rows_; }

 private:
  int64_t keep_;
  int64_t count_ = 0;
  std::vector<ViolationRow> rows_;
};

inline int64_t log_room(const ViolationLog& log) {
  const int64_t used = *log.write_index < 0 ? 0 : *log.write_index;
  return used < log.rows ? log.rows - used : 0;
}

inline void normalize_index(const ViolationLog& log) {
  if (*log.write_index < 0) *log.write_index = 0;
}

inline void append_rows(const ViolationLog& log, const RowCollector& collected) {
  const int64_t start = *log.write_index;
  for (size_t i = 0; i < collected.rows().size(); ++i) {
    const int64_t index = start + static_cast<int64_t>(i);
    if (index >= log.rows) break;
    store_row(log, index, collected.rows()[i]);
  }
  const int64_t next = start + collected.count();
  *log.write_index = static_cast<int32_t>(next > kInt32Max ? kInt32Max : next);
}

}  // namespace kvcanary::cpu

#endif  // KVCANARY_LOG_CPU_H_
