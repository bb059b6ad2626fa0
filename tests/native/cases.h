// The generator: static geometry is always what the handlers accept, everything dynamic may be anything.
#ifndef KVCANARY_TESTS_CASES_H_
#define KVCANARY_TESTS_CASES_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "case.h"
#include "model.h"
#include "random.h"

namespace kvtest {

class Generator {
 public:
  // `giant`: enough work to fill a large device, for the paths that only then are taken.
  Generator(uint64_t seed, bool giant) : random_(~seed), calm_(random_.one_in(4) || giant), giant_(giant) { case_.seed = seed; }

  Case make(Op op) {
    case_.op = op;
    switch (op) {
      case Op::kPlan:
        make_plan();
        break;
      case Op::kVerify:
        make_verify();
        break;
      case Op::kVerifyFused:
        make_verify_fused();
        break;
      case Op::kWrite:
        make_write();
        break;
      case Op::kScatter:
        make_scatter();
        break;
    }
    return std::move(case_);
  }

 private:
  static constexpr int64_t kMostEntries = 3000;  // of most verifies; a few are larger
  static constexpr int64_t kGiantWidth = 6000;

  // --- integers ---

  Manner any_manner() {
    return calm_ ? Manner::kClean : random_.pick({Manner::kClean, Manner::kClean, Manner::kMixed, Manner::kMixed, Manner::kWild});
  }

  int64_t small_size() { return random_.pick<int64_t>({0, 1, 2, 3, random_.between(0, 8), random_.between(0, 40)}); }

  // Shifts keep elements aligned to their size: 4 bytes, or 8 for wide ones.
  Ints finish(std::vector<int64_t> values, bool wide) {
    Ints out;
    out.wide = wide;
    out.shift = wide ? random_.pick({0, 0, 0, 8}) : random_.pick({0, 0, 0, 4, 8, 12});
    out.values = std::move(values);
    if (!wide) {
      for (int64_t& v : out.values) v = static_cast<int32_t>(static_cast<uint32_t>(v));
    }
    return out;
  }

  // `count` integers that should lie in [0, n).
  Ints indices(int64_t count, int64_t n) { return indices(count, n, any_manner()); }
  Ints indices(int64_t count, int64_t n, Manner manner) {
    const bool wide = random_.one_in(2);
    std::vector<int64_t> values(static_cast<size_t>(count));
    for (int64_t& v : values) v = index_value(random_, n, wide, manner);
    return finish(std::move(values), wide);
  }

  // 64-bit names of requests and of namespaces: mostly few, at times any.
  Ints names(int64_t count) { return indices(count, 3); }

  // An operand that may be left out, or be shorter than it could.
  int64_t up_to(int64_t n) { return random_.pick<int64_t>({0, n, n, n, random_.between(0, n)}); }

  std::vector<uint32_t> random_words(int64_t count) {
    std::vector<uint32_t> out(static_cast<size_t>(count));
    for (uint32_t& w : out) w = static_cast<uint32_t>(random_.next());
    return out;
  }

  void fill(std::vector<unsigned char>& bytes) {
    for (size_t i = 0; i < bytes.size(); i += 8) {
      uint64_t word = random_.next();
      for (size_t j = i; j < std::min(bytes.size(), i + 8); ++j, word >>= 8) bytes[j] = static_cast<unsigned char>(word);
    }
  }

  // --- records, tags and log ---

  void make_state() {
    State& s = case_.state;
    s.slots =
        random_.pick<int64_t>({0, 1, 2, random_.between(3, 9), random_.between(10, 80), random_.between(10, 80), random_.between(10, 80)});
    if (random_.one_in(60)) s.slots = random_.between(300, 3000);
    if (calm_) s.slots = random_.between(60, 300);
    if (giant_) s.slots = 2 * kGiantWidth;
    s.words = random_.pick({8, 8, 9, 10, 12, 16, 16, 20});
    s.records.shift = random_.pick({0, 0, 0, 4, 8, 12});
    s.records.values = std::vector<uint32_t>(static_cast<size_t>(s.slots * s.words), 0);
    const int style = static_cast<int>(random_.below(3));
    for (int64_t slot = 0; slot < s.slots; ++slot) {
      if (style == 0 || (style == 1 && random_.one_in(3))) continue;
      for (int word = 0; word < s.words; ++word) {
        s.records.values[record_at(s, slot, word)] =
            static_cast<uint32_t>(style == 1 ? static_cast<uint64_t>(random_.below(4)) : random_.next());
      }
      // Blank but for a single word: not unwritten, if the word counts.
      if (random_.one_in(6)) {
        for (int word = 0; word < s.words; ++word) s.records.values[record_at(s, slot, word)] = 0;
        s.records.values[record_at(s, slot, static_cast<int>(random_.below(s.words)))] = 1;
      }
    }
    s.ring_rows = random_.pick<int64_t>({0, 1, 3, 100, 100, 100, 8000});
    s.ring.shift = random_.pick({0, 0, 4, 8});
    s.ring.values.assign(static_cast<size_t>(s.ring_rows * kvcanary::kRingWords), 0xDEADBEEFu);
    const int64_t n = s.ring_rows;
    s.write_index = static_cast<int32_t>(
        random_.pick<int64_t>({0, 0, 0, 0, n - 1, n, n + 1, random_.between(0, n + 2), -1, -5, kMin32, kMax32, kMax32 - 1, kMax32 - 7}));
    for (int tag = 0; tag < kvcanary::kNumLaunchTags; ++tag) {
      s.slot_runs[static_cast<size_t>(tag)] = random_.pick<uint64_t>({0, ~uint64_t{0}, ~uint64_t{0} - 3, 0xFFFFFFFFull, random_.next()});
      s.kernel_runs[static_cast<size_t>(tag)] = random_.pick<uint64_t>({0, ~uint64_t{0}, 0xFFFFFFFFull, random_.next()});
    }
  }

  void make_launch() {
    Launch& launch = case_.launch;
    launch.tag = static_cast<int32_t>(random_.below(kvcanary::kNumLaunchTags));
    launch.context = {static_cast<uint32_t>(random_.next()), static_cast<uint32_t>(random_.next())};
    launch.extended = random_.below(3) != 0;
    launch.strict = random_.one_in(2);
    launch.has_padding_slot = !random_.one_in(4);
    launch.padding_slot = random_.pick<int64_t>({0, 0, 0, random_.between(0, 8)});
    if (random_.one_in(5)) launch.padding_slot = hostile_value(random_, case_.state.slots, true);
  }

  // --- sources ---

  // One short run a slot, so that very many slots fit.
  SourceSpec make_giant_spec(int64_t slots) {
    SourceSpec s;
    s.pages = slots;
    s.run_bytes = s.read_bytes = s.page_stride = random_.pick<int64_t>({16, 48, 112, 128, 144, 256, 272});
    return s;
  }

  // A stride that is never used may be any number.
  int64_t dead_stride(int64_t unit) {
    return random_.pick<int64_t>({0, 0, unit, unit * random_.between(0, 64), int64_t{1} << 58, random_.below((int64_t{1} << 58) + 1)});
  }

  // The bytes that a buffer must have.
  static __int128 extent(const SourceSpec& s) {
    __int128 end = static_cast<__int128>(s.offset) + s.run_bytes;
    for (size_t level = 0; level < 4; ++level) end += static_cast<__int128>(s.counts[level] - 1) * s.strides[level];
    if (s.pages > 0) end += static_cast<__int128>(s.pages - 1) * s.page_stride + static_cast<__int128>(s.page_size - 1) * s.token_stride;
    return end;
  }

  // Pages, places and runs are laid out one inside the other, in any order and with gaps. `pages * page_size` is near `slots`.
  SourceSpec make_spec(int64_t slots, int64_t most_bytes) {
    SourceSpec s;
    const int64_t unit = random_.pick<int64_t>({1, 2, 4, 8, 16, 16});
    s.page_size = random_.pick<int64_t>({1, 1, 2, 3, 4, 16, slots + 1, random_.between(1, slots + 2)});
    const int64_t near = calm_ ? slots : std::max<int64_t>(0, slots + random_.pick<int64_t>({0, 0, 0, 0, 1, 5, -1, -3, -slots}));
    s.pages = (near + (!calm_ && random_.one_in(4) ? 0 : s.page_size - 1)) / s.page_size;
    // From 128 bytes on a run may be staged in pieces of 256, up to eight at a time.
    s.run_bytes =
        unit * random_.pick<int64_t>({random_.between(1, 6), random_.between(1, 6), 7, 8, 9, 16, 17, 32, random_.between(100, 170)});
    if (!random_.one_in(3)) {
      for (int64_t& count : s.counts) count = random_.pick<int64_t>({1, 1, 2, 3});
    }
    const bool wide_read = random_.one_in(12);
    if (wide_read) s.counts[static_cast<size_t>(random_.below(4))] = random_.between(100, 700);

    std::array<int64_t*, 6> strides{&s.page_stride, &s.token_stride, &s.strides[0], &s.strides[1], &s.strides[2], &s.strides[3]};
    const std::array<int64_t, 6> counts{std::max<int64_t>(s.pages, 1), s.page_size, s.counts[0], s.counts[1], s.counts[2], s.counts[3]};
    std::vector<size_t> order{5, 4, 3, 2, 1, 0};
    if (random_.one_in(2)) random_.shuffle(order);
    int64_t reach = s.run_bytes;
    for (const size_t axis : order) {
      int64_t stride = reach + unit * random_.pick<int64_t>({0, 0, 0, 1, 2});
      // Overlapping strides are served too, and make long reads of small buffers.
      if ((wide_read && counts[axis] > 50) || random_.one_in(30)) stride = 0;
      if (counts[axis] == 1) {
        *strides[axis] = random_.one_in(3) ? dead_stride(unit) : stride;
        continue;
      }
      if (reach + stride * (counts[axis] - 1) > most_bytes) stride = reach + unit * (counts[axis] - 1) > most_bytes ? 0 : unit;
      *strides[axis] = stride;
      reach += stride * (counts[axis] - 1);
    }
    if (s.pages == 0) s.page_stride = random_.one_in(2) ? dead_stride(unit) : 0;
    // Where nothing moves, a count may be any number.
    if (s.pages > 1 && s.page_stride == 0 && random_.one_in(3)) s.pages = kMax32;
    if (s.page_size > 1 && s.token_stride == 0 && random_.one_in(3)) s.page_size = kMax32;
    for (size_t level = 0; level < 4; ++level) {
      if (s.counts[level] > 50 && s.strides[level] == 0 && random_.one_in(3)) s.counts[level] = kMax32;
    }
    s.offset = unit * random_.pick<int64_t>({0, 0, 1, 3, random_.between(0, 40)});
    const int64_t total = std::accumulate(s.counts.begin(), s.counts.end(), s.run_bytes, [](int64_t a, int64_t b) { return a * b; });
    const int64_t most = std::min<int64_t>(total, 19200);
    s.read_bytes = random_.pick<int64_t>({most, most, most, most / unit / 2 * unit, std::min<int64_t>(most, 16),
                                          std::min<int64_t>(most, 17), random_.between(0, most), random_.one_in(3) ? 0 : most});
    if (random_.one_in(12)) {
      // A source of no bytes bounds no slots: a slot's address may be far outside of its buffer.
      s.pages = random_.below(2);
      s.page_size = 1;
      s.read_bytes = 0;
      s.page_stride = int64_t{1} << 58;
    }
    return s;
  }

  void make_sources() {
    Sources& out = case_.sources;
    const int64_t slots = case_.state.slots;
    out.mode = random_.pick({kvcanary::kModeNone, kvcanary::kModePartial, kvcanary::kModeAll, kvcanary::kModeAll});
    int64_t count = random_.pick<int64_t>({0, 1, 1, 2, 5});
    if (random_.one_in(12)) count = 40;
    if (random_.one_in(24)) count = 130;
    out.max_piece = random_.one_in(6) ? random_.pick({1, 2, 4, 8}) : 16;
    if (giant_) count = random_.between(1, 3);
    const int64_t most_bytes = giant_ ? 400 * slots : count > 5 ? 6000 : 50000;
    // Layers of one buffer are alike; buffers differ.
    const bool alike = random_.one_in(2);
    for (int64_t k = 0; k < count; ++k) {
      SourceSpec s;
      if (alike && !giant_ && k % 16 != 0) {
        s = out.specs.back();
        s.offset += random_.pick<int64_t>({16, 16, 32, 48});
      } else {
        s = giant_ ? make_giant_spec(slots) : make_spec(slots, most_bytes);
        if (out.buffers.empty() || !random_.one_in(4)) out.buffers.push_back({{}, random_.pick({0, 0, 0, 0, 1, 2, 4, 8})});
        s.buffer =
            random_.one_in(6) ? random_.below(static_cast<int64_t>(out.buffers.size())) : static_cast<int64_t>(out.buffers.size()) - 1;
      }
      out.specs.push_back(s);
    }
    for (size_t i = 0; i < out.buffers.size(); ++i) {
      int64_t bytes = 0;
      for (const SourceSpec& s : out.specs) {
        if (s.buffer != static_cast<int64_t>(i) || s.pages == 0) continue;
        if (extent(s) > 8 * most_bytes + 4096) throw std::logic_error("the generator made a source that is too large");
        bytes = std::max(bytes, static_cast<int64_t>(extent(s)));
      }
      if (random_.one_in(10)) bytes += random_.between(1, 40);
      out.buffers[i].values.resize(static_cast<size_t>(bytes));
      fill(out.buffers[i].values);
    }
    State& state = case_.state;
    state.has_tags = count > 0 && random_.one_in(2);
    if (!state.has_tags) return;
    state.tags.values = random_words(slots * count);
    state.tags.shift = random_.pick({0, 0, 4, 8});
  }

  // --- batches ---

  // kLong: more entries than a chunk of work; kGiant: the same long prefixes in many requests; kHuge: more than 32 bits hold.
  enum class Length { kAny, kLong, kGiant, kHuge };

  void make_tables(Batch& b, int64_t slots, Length length) {
    const bool huge = length == Length::kHuge;
    b.kind = static_cast<int32_t>(random_.below(4));
    if (huge) b.kind = kvcanary::kTableBlocks;
    if (length == Length::kLong) b.kind = kvcanary::kTableFlat;
    if (length == Length::kGiant) b.kind = random_.pick({kvcanary::kTableRows, kvcanary::kTableRows, kvcanary::kTableIdentity});
    b.table_rows = random_.pick<int64_t>({0, 1, random_.between(1, 12), random_.between(1, 12), random_.between(1, 12)});
    b.table_width = random_.pick<int64_t>({0, 1, random_.between(1, 30), random_.between(1, 30), random_.between(1, 30)});
    b.page_size = random_.pick<int64_t>({1, 2, 3, 16, random_.between(1, 20)});
    // The handlers see to it that no row of blocks has more than 2^31 - 1 positions.
    if (random_.one_in(12)) b.page_size = random_.pick<int64_t>({kMax32 / std::max<int64_t>(b.table_width, 1), int64_t{1} << 16});
    b.has_mapping = random_.one_in(3);
    int64_t mapped = slots;
    if (b.has_mapping && !calm_) mapped = random_.pick<int64_t>({0, 1, slots, slots, slots + random_.between(1, 30)});
    if (calm_) {
      b.table_rows = b.size() + random_.between(1, 4);
      b.page_size = random_.between(1, 5);
      b.table_width = slots / b.table_rows / (b.kind == kvcanary::kTableBlocks ? b.page_size : 1);
    }
    if (length == Length::kGiant) b.table_rows = 2, b.table_width = kGiantWidth;
    const bool distinct = calm_ || random_.one_in(2);
    const auto entries = [&](int64_t count, int64_t n) {
      Ints out = indices(count, n);
      // A healthy pool: no two positions share a slot, as far as it goes.
      if (distinct && n > 0) {
        std::vector<int64_t> order(static_cast<size_t>(n));
        std::iota(order.begin(), order.end(), 0);
        random_.shuffle(order);
        for (int64_t i = 0; i < std::min(count, n); ++i) out.values[static_cast<size_t>(i)] = order[static_cast<size_t>(i)];
      }
      return out;
    };
    if (b.has_mapping) b.mapping = entries(mapped, slots);
    switch (b.kind) {
      case kvcanary::kTableRows:
        b.table = entries(b.table_rows * b.table_width, mapped);
        break;
      case kvcanary::kTableBlocks:
        if (huge) b.table_rows = 1, b.table_width = random_.between(1, 3000), b.page_size = kMax32 / b.table_width;
        b.table = huge    ? indices(b.table_width, 8, Manner::kClean)
                  : calm_ ? entries(b.table_rows * b.table_width, mapped / b.page_size)
                          : entries(b.table_rows * b.table_width, mapped / b.page_size + (mapped > 0));
        break;
      case kvcanary::kTableFlat: {
        const int64_t n = length == Length::kLong ? random_.between(9000, 20000)
                          : calm_                 ? mapped
                                                  : random_.pick<int64_t>({0, 1, random_.between(1, 200)});
        b.table = entries(n, mapped);
        const bool wide = random_.one_in(2);
        const Manner manner = length == Length::kLong ? Manner::kClean : any_manner();
        std::vector<int64_t> starts(static_cast<size_t>(b.size()) + 1);
        for (int64_t& v : starts) v = random_.between(0, n);
        std::sort(starts.begin(), starts.end());
        for (int64_t& v : starts) {
          if (manner != Manner::kClean && random_.one_in(manner == Manner::kWild ? 2 : 10)) v = hostile_value(random_, n, wide);
        }
        b.table_starts = finish(std::move(starts), wide);
        b.table_rows = b.table_width = 0;
        break;
      }
      default:
        if (!calm_ && random_.one_in(10)) b.table_width = kMax32 / std::max<int64_t>(b.table_rows, 1);
        b.table = finish({}, random_.one_in(2));
    }
  }

  // Prefixes fill what a row can hold, or pass it by a little or by far.
  Ints make_prefixes(const Batch& b, Length length) {
    const bool wide = length == Length::kHuge || random_.one_in(2);
    const Manner manner = any_manner();
    std::vector<int64_t> out;
    for (int64_t r = 0; r < b.size(); ++r) {
      int64_t room = b.kind == kvcanary::kTableBlocks ? b.table_width * b.page_size : b.table_width;
      if (b.kind == kvcanary::kTableFlat) {
        const __int128 own = static_cast<__int128>(b.table_starts.at(r + 1)) - b.table_starts.at(r);
        room = own < 0 || own > kMax32 ? 0 : static_cast<int64_t>(own);
      }
      if (b.kind == kvcanary::kTableIdentity && random_.one_in(3)) room = room * 3 + 2;
      if (b.kind == kvcanary::kTableIdentity && wide && random_.one_in(6)) {
        // Positions of a ring go on for ever.
        out.push_back(kMax64 - random_.below(40));
        continue;
      }
      out.push_back(length != Length::kAny ? room
                    : random_.one_in(3)    ? std::min<int64_t>(room, kMax32)
                                           : index_value(random_, std::min<int64_t>(room + 1, kMax32), wide, manner));
    }
    return finish(std::move(out), wide);
  }

  int64_t batch_size() {
    if (random_.one_in(250)) return random_.pick<int64_t>({10000, 1024, 1025});
    if (random_.one_in(40)) return random_.between(100, 2100);
    return small_size();
  }

  void make_batch(int64_t bs, Length length = Length::kAny) {
    const bool huge = length == Length::kHuge;
    Batch& b = case_.batch;
    const int64_t slots = case_.state.slots;
    // The number of rows is known only with the table; both are drawn near each other.
    b.req_pool_indices.values.resize(static_cast<size_t>(bs));
    make_tables(b, slots, length);
    const int64_t rows = b.kind == kvcanary::kTableFlat ? bs : b.table_rows;
    b.req_pool_indices = indices(bs, rows, huge ? Manner::kClean : any_manner());
    if (length == Length::kAny && bs > 0 && bs <= rows && (calm_ || random_.one_in(2))) {
      std::vector<int64_t> order(static_cast<size_t>(rows));
      std::iota(order.begin(), order.end(), 0);
      random_.shuffle(order);
      order.resize(static_cast<size_t>(bs));
      b.req_pool_indices.values = order;
    }
    if (b.kind == kvcanary::kTableFlat && random_.one_in(3)) {
      // The request rows of a flat table name nothing but padding and expected tokens.
      for (int64_t& v : b.req_pool_indices.values) v = random_.between(-6, 6);
    }
    b.prefix_lens = make_prefixes(b, length);
    b.extend_seq_lens = indices(bs, 5);
    b.has_expected = random_.one_in(2);
    if (b.has_expected) {
      b.expected_rows = random_.pick<int64_t>({0, 1, rows, rows, rows + 1});
      b.expected_width = random_.pick<int64_t>({0, 1, 40, random_.between(1, 40)});
      if (b.expected_rows > 3000) b.expected_rows = 3000;
      b.expected_tokens = indices(b.expected_rows * b.expected_width, 5);
      b.valid_lens = indices(bs, b.expected_width + 2);
    }
    b.window = length != Length::kAny ? 0 : random_.pick<int64_t>({0, 0, 0, 1, 2, random_.between(1, 20), kMax32});
    b.token_offset = random_.pick<int64_t>({0, 0, 0, 1, 1, -1, random_.between(-30, 30)});
    if (random_.one_in(10)) b.token_offset = random_.pick<int64_t>({kMin32, kMax32});
    b.has_padding_req = random_.one_in(2) && !huge;
    b.padding_req = random_.one_in(4) ? hostile_value(random_, rows, true) : random_.pick<int64_t>({0, 0, random_.between(0, 3)});
  }

  // Shortens prefixes until the batch has at most `most` entries, since a verify visits each of them.
  void limit_entries(int64_t most) {
    Batch& b = case_.batch;
    int64_t total = 0;
    for (int64_t r = 0; r < b.size(); ++r) {
      const auto own = [&] {
        const ModelRequest request = model_request(b, r);
        return request.end - request.begin;
      };
      if (add_saturating(total, own(), kMax64) > most) b.prefix_lens.values[static_cast<size_t>(r)] = total < most ? random_.below(3) : 0;
      total += own();
    }
  }

  // A batch that a verify can visit.
  void make_verify_batch() {
    const bool is_long = !giant_ && random_.one_in(50);
    make_batch(giant_    ? random_.pick<int64_t>({11, 20, 50})
               : is_long ? random_.between(1, 5)
                         : batch_size(),
               giant_    ? Length::kGiant
               : is_long ? Length::kLong
                         : Length::kAny);
    limit_entries(giant_ ? 400000 : is_long ? 20000 : kMostEntries);
  }

  // --- plan ---

  void make_plan() {
    case_.state.slots = random_.pick<int64_t>({0, 1, random_.between(2, 60), random_.between(2, 60), random_.between(100, 400)});
    const Length length = random_.one_in(50) ? Length::kHuge : random_.one_in(30) ? Length::kLong : Length::kAny;
    make_batch(length == Length::kHuge ? random_.between(1, 2000) : length == Length::kLong ? random_.between(1, 5) : batch_size(), length);
    if (length == Length::kAny && !random_.one_in(4)) limit_entries(kMostEntries);
    PlanShape& plan = case_.plan;
    const int64_t total = model_total(case_.batch);
    const int64_t capacity = random_.pick<int64_t>(
        {0, 1, total - 1, total - 1, total, total, total, total / 2, total < 30000 ? total + random_.between(1, 50) : 0, 100});
    plan.verify_capacity = std::clamp<int64_t>(capacity, 0, 30000);
    plan.write_req_capacity = case_.batch.size() + random_.pick<int64_t>({0, 0, 1, 5, 1100});
    plan.wide = random_.one_in(2);
  }

  // --- verify ---

  void make_verify_parts() {
    VerifyParts& v = case_.verify;
    v.namespaces = names(up_to(case_.batch.size()));
    v.check_token = random_.one_in(2);
    // Rotation stands on tags.
    v.rotate = case_.state.has_tags && random_.one_in(2);
    const int64_t sources = static_cast<int64_t>(case_.sources.specs.size());
    for (int32_t& value : v.source_window) {
      value = static_cast<int32_t>(random_.one_in(2) ? random_.between(0, sources + 1) : hostile_value(random_, sources, false));
    }
  }

  // Makes the pool hold what the entries expect, then breaks a little of it.
  void stamp(const std::vector<ModelEntry>& entries) {
    State& state = case_.state;
    std::vector<uint32_t>& records = state.records.values;
    if (!calm_ && random_.one_in(4)) return;
    const int64_t slots = reachable_slots(case_);
    const bool mark = random_.one_in(2);
    RealKv real_kv(case_);
    const std::vector<SourceSpec>& specs = case_.sources.specs;
    for (const ModelEntry& e : entries) {
      if (e.slot < 0 || e.slot >= slots) continue;
      const ModelChain chain = model_chain_of(case_, records, e, slots);
      const SlotHashes& real = real_kv.of(e.slot);
      // Requests with a prefix in common agree on it.
      const uint64_t token =
          e.token != -1 ? static_cast<uint64_t>(e.token) : (static_cast<uint64_t>(e.slot) + static_cast<uint64_t>(e.position)) % 5;
      set_model_record(state, records, e.slot,
                       {token, static_cast<uint64_t>(e.position), chain.reachable ? chain.hash : random_.next(), real.combined});
      for (int word = 8; word < state.words && mark; ++word)
        records[record_at(state, e.slot, word)] = static_cast<uint32_t>(random_.below(3));
      for (size_t k = 0; state.has_tags && k < real.tags.size(); ++k)
        state.tags.values[static_cast<size_t>(e.slot) * specs.size() + k] = real.tags[k];
    }
    const auto flip = [&](std::vector<uint32_t>& words) {
      if (!words.empty()) words[static_cast<size_t>(random_.below(static_cast<int64_t>(words.size())))] ^= 1u << random_.below(32);
    };
    if (calm_ && random_.one_in(2)) return;
    for (int64_t n = random_.pick<int64_t>({0, 0, 1, 3}); n > 0; --n) flip(records);
    for (int64_t n = random_.pick<int64_t>({0, 0, 1, 3}); n > 0; --n) flip(state.tags.values);
    for (int64_t n = random_.pick<int64_t>({0, 0, 1, 3}); n > 0 && !case_.sources.buffers.empty(); --n) {
      std::vector<unsigned char>& bytes =
          case_.sources.buffers[static_cast<size_t>(random_.below(static_cast<int64_t>(case_.sources.buffers.size())))].values;
      if (!bytes.empty())
        bytes[static_cast<size_t>(random_.below(static_cast<int64_t>(bytes.size())))] ^=
            static_cast<unsigned char>(random_.between(1, 255));
    }
    for (int64_t n = random_.pick<int64_t>({0, 0, 0, 1, 1, slots / 4, slots}); n > 0 && slots > 0; --n) {
      const int64_t slot = random_.below(slots);
      for (int word = 0; word < state.words; ++word) records[record_at(state, slot, word)] = 0;
    }
  }

  void make_verify() {
    make_state();
    make_launch();
    make_sources();
    Entries& out = case_.entries;
    const int64_t slots = case_.state.slots;
    std::vector<ModelEntry> entries;
    if (!calm_ && random_.one_in(3)) {
      case_.batch.req_pool_indices = indices(batch_size(), 12);
      const int64_t bs = case_.batch.size();
      const int64_t n = random_.one_in(60) ? random_.between(4000, 9000) : small_size();
      out.slot_indices = indices(n, slots);
      out.prev_slot_indices = indices(n, slots);
      out.expected_positions = indices(n, 10);
      out.expected_tokens = indices(n, 10);
      out.batch_rows = indices(up_to(n), bs);
      for (int64_t r = 0; r < bs; ++r) out.row_status.push_back(random_.one_in(4) ? random_.pick({128, 1, -1}) : 0);
      make_verify_parts();
      entries = {};
      for (int64_t i = 0; i < n; ++i) {
        entries.push_back({out.slot_indices.at(i), out.prev_slot_indices.at(i), out.expected_positions.at(i), out.expected_tokens.at(i),
                           out.batch_rows.get(i, -1)});
      }
    } else {
      make_verify_batch();
      make_verify_parts();
      entries = model_entries(case_.batch, 0);
      for (int64_t r = 0; r < case_.batch.size(); ++r) out.row_status.push_back(model_request(case_.batch, r).status);
      const auto column = [&](int64_t ModelEntry::* member) {
        const bool wide = random_.one_in(2);
        std::vector<int64_t> values;
        for (const ModelEntry& e : entries) values.push_back(model_narrow(e.*member, wide));
        for (int64_t n = calm_ ? 0 : random_.pick<int64_t>({0, 0, 5}); n > 0; --n) values.push_back(hostile_value(random_, slots, wide));
        return values.empty() ? finish({}, wide) : finish(std::move(values), wide);
      };
      out.slot_indices = column(&ModelEntry::slot);
      out.prev_slot_indices = column(&ModelEntry::prev_slot);
      out.expected_positions = column(&ModelEntry::position);
      out.expected_tokens = column(&ModelEntry::token);
      out.batch_rows = column(&ModelEntry::batch_row);
      const size_t n = out.slot_indices.values.size();
      for (Ints* a : {&out.expected_tokens, &out.expected_positions, &out.prev_slot_indices}) a->values.resize(n, -1);
      if (out.batch_rows.values.size() > n) out.batch_rows.values.resize(n);
    }
    const int64_t n = out.slot_indices.size();
    const int64_t clean = static_cast<int64_t>(entries.size());
    out.num_valid = static_cast<int32_t>(
        random_.pick<int64_t>({std::min(n, clean), std::min(n, clean), n, n - 1, n + 1, -1, kMin32, kMax32, random_.between(0, n)}));
    out.enable = static_cast<int32_t>(random_.pick<int64_t>({1, 1, 1, 1, 1, 0, -1, 2, kMin32}));
    stamp(entries);
  }

  void make_verify_fused() {
    make_state();
    make_launch();
    make_sources();
    make_verify_batch();
    case_.batch.extend_seq_lens = {};
    if (random_.one_in(2)) {
      case_.batch.stride =
          random_.pick<int64_t>({2, 3, 4, 7, 16, random_.between(1, 40), kMax32, kMax32 - random_.below(1000), random_.between(1, kMax32)});
    }
    make_verify_parts();
    Batch every = case_.batch;
    every.stride = 1;
    stamp(model_entries(every, 0));
  }

  // --- write ---

  void make_write() {
    make_state();
    make_launch();
    make_sources();
    WriteParts& w = case_.write;
    const int64_t slots = case_.state.slots;
    int64_t capacity = small_size();
    int64_t tokens = random_.pick<int64_t>({0, 1, 5, 31, 32, 33, 64, 65, random_.between(0, 200)});
    if (random_.one_in(40)) capacity = random_.between(100, 1500);
    if (random_.one_in(40)) tokens = random_.between(1000, 9000);
    if (giant_) capacity = random_.pick<int64_t>({1, 40, 2000}), tokens = random_.pick<int64_t>({20000, 60000});
    const Manner manner = capacity * tokens > 40000 ? Manner::kClean : any_manner();
    std::vector<int64_t> offsets(static_cast<size_t>(capacity) + 1);
    for (int64_t& v : offsets) v = random_.between(0, tokens);
    std::sort(offsets.begin(), offsets.end());
    offsets.front() = 0;
    if (random_.one_in(2)) offsets.back() = tokens;
    const std::vector<int64_t> clean_offsets = offsets;
    const bool wide_offsets = random_.one_in(2);
    for (int64_t& v : offsets) {
      if (manner != Manner::kClean && random_.one_in(manner == Manner::kWild ? 2 : 10)) v = hostile_value(random_, tokens, wide_offsets);
    }
    w.write_offsets = finish(std::move(offsets), wide_offsets);
    w.num_valid_reqs = static_cast<int32_t>(random_.one_in(4) ? hostile_value(random_, capacity, false) : capacity);

    // Each slot belongs to one request, so that requests stay out of each other's way.
    const auto owner = [&](int64_t slot) { return slot % std::max<int64_t>(capacity, 1); };
    const bool apart = !random_.one_in(10);
    const auto own_slot = [&](int64_t r) {
      const int64_t slot = slots > 0 ? random_.below(slots) : -1;
      return !apart             ? slot
             : slot < 0         ? -1
             : owner(slot) == r ? slot
             : r < slots        ? r + (slot - owner(slot)) >= slots ? r : r + (slot - owner(slot))
                                : -1;
    };
    const auto destinations = [&](const std::vector<int64_t>& owners, int64_t none_in) {
      const bool wide = random_.one_in(2);
      const Manner how = any_manner();
      std::vector<int64_t> out;
      for (const int64_t r : owners) {
        const bool hostile = how == Manner::kWild ? random_.one_in(2) : how == Manner::kMixed && random_.one_in(10);
        out.push_back(hostile ? hostile_value(random_, slots, wide) : random_.one_in(none_in) ? -1 : own_slot(r));
      }
      return finish(std::move(out), wide);
    };
    std::vector<int64_t> token_owner(static_cast<size_t>(tokens), 0);
    for (int64_t r = 0; r < capacity; ++r) {
      for (int64_t i = clean_offsets[static_cast<size_t>(r)]; i < clean_offsets[static_cast<size_t>(r) + 1]; ++i)
        token_owner[static_cast<size_t>(i)] = r;
    }
    std::vector<int64_t> requests(static_cast<size_t>(capacity));
    std::iota(requests.begin(), requests.end(), 0);
    w.out_cache_loc = destinations(token_owner, 12);
    w.seed_slots = destinations(requests, 3);

    w.chain_position_assert = static_cast<int32_t>(random_.pick<int64_t>({0, 1, 1, -1, kMin32}));
    w.input_ids = indices(tokens, 6);
    w.positions = indices(tokens, 6);
    if (calm_) w.positions.wide = true, w.positions.shift = 0;
    if (calm_ || random_.one_in(2)) {
      // Positions that follow each other from the seed's on.
      for (int64_t r = 0; r < capacity; ++r) {
        const int64_t seed = w.seed_slots.at(r);
        uint64_t position = seed >= 0 && seed < slots ? model_record(case_.state, case_.state.records.values, seed).position + 1 : 0;
        for (int64_t i = clean_offsets[static_cast<size_t>(r)]; i < clean_offsets[static_cast<size_t>(r) + 1]; ++i) {
          if (!random_.one_in(calm_ ? 400 : 20))
            w.positions.values[static_cast<size_t>(i)] = w.positions.wide ? static_cast<int64_t>(position) : static_cast<int32_t>(position);
          if (w.out_cache_loc.at(i) != -1) ++position;
        }
      }
    }
    w.assert_input = random_.one_in(2);
    if (w.assert_input) {
      const auto nearly = [&](const Ints& from) {
        std::vector<int64_t> values = from.values;
        const int64_t differ = calm_ ? 1000 : random_.pick<int64_t>({2, 20, 1000});
        for (int64_t& v : values) v ^= random_.one_in(differ) ? 1 : 0;
        return finish(std::move(values), from.wide || random_.one_in(2));
      };
      w.expected_tokens = nearly(w.input_ids);
      w.expected_positions = nearly(w.positions);
    }
    w.req_pool_indices = indices(up_to(capacity), 12);
    w.request_ids = names(up_to(capacity));
    w.namespaces = names(up_to(capacity));
    w.record_flags = static_cast<uint32_t>(random_.pick<uint64_t>({0, 1, 2, 3, 0xFFFFFFFFull}));
    if (apart) separate_requests();
  }

  // Takes from requests the slots that an earlier one writes, and the seeds that another one writes.
  void separate_requests() {
    WriteParts& w = case_.write;
    const int64_t slots = reachable_slots(case_);
    const int64_t requests = std::clamp<int64_t>(w.num_valid_reqs, 0, w.capacity());
    std::map<int64_t, int64_t> writer;
    for (const bool second : {false, true}) {
      if (second) writer.clear();
      for (int64_t r = 0; r < requests; ++r) {
        for (int64_t i = std::max<int64_t>(0, w.write_offsets.at(r)); i < std::min(w.write_offsets.at(r + 1), w.tokens()); ++i) {
          int64_t& slot = w.out_cache_loc.values[static_cast<size_t>(i)];
          if (slot < 0 || slot >= slots) continue;
          if (writer.emplace(slot, r).first->second != r) slot = -1;
        }
      }
    }
    for (int64_t r = 0; r < requests; ++r) {
      int64_t& seed = w.seed_slots.values[static_cast<size_t>(r)];
      const auto known = writer.find(seed);
      if (known != writer.end() && known->second != r) seed = -1;
    }
  }

  // --- scatter ---

  void make_scatter() {
    ScatterParts& s = case_.scatter;
    const int64_t bs = batch_size();
    const int64_t tokens = random_.pick<int64_t>({0, 1, random_.between(0, 60), random_.between(0, 400)});
    s.rows = random_.pick<int64_t>({0, 1, random_.between(1, 20), bs + 1});
    s.width = random_.pick<int64_t>({0, 1, random_.between(1, 40)});
    s.flat_in = indices(tokens, 100);
    s.req_pool_indices = indices(bs, s.rows);
    if (bs > 0 && bs <= s.rows && !random_.one_in(4)) {
      std::vector<int64_t> order(static_cast<size_t>(s.rows));
      std::iota(order.begin(), order.end(), 0);
      random_.shuffle(order);
      for (int64_t r = 0; r < bs; ++r) {
        // The hostile ones stay.
        int64_t& row = s.req_pool_indices.values[static_cast<size_t>(r)];
        if (row >= 0 && row < s.rows) row = order[static_cast<size_t>(r)];
      }
    }
    const bool wide = random_.one_in(2);
    const Manner manner = any_manner();
    std::vector<int64_t> offsets(static_cast<size_t>(bs) + 1);
    for (int64_t& v : offsets) v = random_.between(0, tokens);
    std::sort(offsets.begin(), offsets.end());
    for (int64_t& v : offsets) {
      if (manner != Manner::kClean && random_.one_in(manner == Manner::kWild ? 2 : 10)) v = hostile_value(random_, tokens, wide);
    }
    s.offsets = finish(std::move(offsets), wide);
    s.pool.resize(static_cast<size_t>(s.rows * s.width));
    for (int32_t& v : s.pool) v = static_cast<int32_t>(random_.next());
  }

  Random random_;
  bool calm_;  // a healthy pool and clean operands: what a launch must stay quiet about
  bool giant_;
  Case case_;
};

// One case in `giant_one_in` is a giant one; 0: none is.
inline Case make_case(uint64_t seed, int64_t giant_one_in) {
  Random random(seed);
  const Op op =
      random.pick({Op::kPlan, Op::kVerify, Op::kVerify, Op::kVerifyFused, Op::kVerifyFused, Op::kWrite, Op::kWrite, Op::kScatter});
  const bool can_be_giant = op == Op::kVerify || op == Op::kVerifyFused || op == Op::kWrite;
  return Generator(seed, can_be_giant && giant_one_in > 0 && random.one_in(giant_one_in)).make(op);
}

}  // namespace kvtest

#endif  // KVCANARY_TESTS_CASES_H_
