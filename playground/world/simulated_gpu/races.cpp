// All memory that work has touched, in ranges of bytes: the last write of each, and the reads since. An access races with
// those of them that the clock of its stream does not cover.
#include "races.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

namespace {

const size_t MOST = 100, MOST_KEPT = 10'000;  // races that a process tells, and of which it knows what they were

struct Mark {
  Work work;
  const char* name;
  Place place;
  std::function<bool()> is_freed;
  bool is_foreign;  // another stream than the work's has written the tensor before
  bool is_gone() const { return is_freed && is_freed(); }
};
using Marked = std::shared_ptr<const Mark>;

// The last write of some bytes, and the reads since, one of each stream.
struct Range {
  uintptr_t end;
  Marked write;
  std::vector<Marked> reads;
};

std::map<uintptr_t, Range>& ranges() {
  static auto* all = new std::map<uintptr_t, Range>;
  return *all;
}

// Have a range begin here, if one is here.
void split(uintptr_t at) {
  auto after = ranges().lower_bound(at);
  if (after == ranges().begin()) return;
  auto& before = std::prev(after)->second;
  if (before.end <= at) return;
  ranges().emplace_hint(after, at, before);
  before.end = at;
}

bool is_before(const Marked& mark, const Clock& clock) { return !mark || clock.has(mark->work.stream, mark->work.piece); }

void read(uintptr_t begin, uintptr_t end, const Marked& mark) {
  split(begin);
  split(end);
  for (uintptr_t at = begin; at < end;) {
    auto found = ranges().lower_bound(at);
    if (found == ranges().end() || found->first > at) {
      const uintptr_t until = found == ranges().end() ? end : std::min(end, found->first);
      found = ranges().emplace_hint(found, at, Range{until, nullptr, {}});
    }
    auto& reads = found->second.reads;
    std::erase_if(reads, [&](const Marked& one) { return one->work.stream == mark->work.stream; });
    reads.push_back(mark);
    at = found->second.end;
  }
}

void write(uintptr_t begin, uintptr_t end, const Marked& mark) {
  forget(begin, end);
  ranges().emplace(begin, Range{end, mark, {}});
}

// What an access comes after without having waited for it: a write, or if it writes, a read.
std::pair<Marked, bool> unordered(const Access& access, const Clock& clock) {
  auto at = ranges().upper_bound(access.begin);
  if (at != ranges().begin()) --at;
  for (; at != ranges().end() && at->first < access.end; ++at) {
    if (at->second.end <= access.begin) continue;
    if (!is_before(at->second.write, clock)) return {at->second.write, true};
    if (access.writes)
      for (const Marked& one : at->second.reads)
        if (!is_before(one, clock)) return {one, false};
  }
  return {};
}

// Whether the tensor that an access is of has come from another stream.
bool is_foreign(const Access& access, size_t stream) {
  auto at = ranges().upper_bound(access.begin);
  if (at == ranges().begin()) return false;
  const Range& range = std::prev(at)->second;
  return range.end > access.begin && range.write && !range.write->is_gone() && (range.write->is_foreign || range.write->work.stream != stream);
}

// Those that were found first, each in a few words, and the number of all. A race of the host is found by a signal's handler.
struct Found {
  std::atomic<size_t> count = 0;
  std::deque<std::string> first;
};
Found& found_so_far() {
  static auto* all = new Found;
  return *all;
}

// What orders the two lines.
std::string fix_of(const Race& race, const std::string& later, const std::string& earlier) {
  if (race.is_reused)
    return "The memory was freed and given out again. To fix it, call x.record_stream(torch.cuda.current_stream()) at " + earlier +
           ", where x is the tensor that came from another stream.";
  if (race.later == "the host") return "To fix it, call torch.cuda.synchronize() before " + later + ".";
  if (race.earlier.starts_with("nccl")) return "To fix it, call wait() of the Work of " + earlier + " before " + later + ", in the same stream.";
  return "To fix it, call torch.cuda.current_stream().wait_stream(s) before " + later + ", where s is the stream of " + earlier + ".";
}

}  // namespace

void remember(const Race& race) {
  auto& all = found_so_far();
  if (all.count++ < MOST_KEPT) all.first.push_back(race.later + " after " + race.earlier);
}

extern "C" size_t simulated_gpu_races() { return found_so_far().count; }

// What is known of a race in a few words, by its number: "aten::add after ncclAllReduce". Null if too many were before it.
extern "C" const char* simulated_gpu_race(size_t number) {
  Lock lock(streams().lock);
  auto& first = found_so_far().first;
  return number < first.size() ? first[number].c_str() : nullptr;
}

std::vector<Race> find_races(const Operation& operation, const Work& work, const Place& place, const Clock& clock) {
  std::vector<Race> found;
  for (const Access& access : operation.accesses) {
    if (access.begin == access.end) continue;
    auto [earlier, has_written] = unordered(access, clock);
    if (!earlier) continue;
    std::string what = access.is_new ? "puts its result into memory of a deleted tensor"
                                     : (access.writes ? "writes " : "reads ") + operation.describe(access.tensor);
    found.push_back({operation.name, what, place, earlier->name, earlier->place, has_written, earlier->is_foreign && earlier->is_gone()});
  }
  for (const Race& one : found) remember(one);
  for (bool writes : {false, true})
    for (const Access& access : operation.accesses) {
      if (access.writes != writes || access.begin == access.end) continue;
      auto mark = std::make_shared<const Mark>(Mark{work, operation.name, place, access.is_freed, is_foreign(access, work.stream)});
      if (writes)
        write(access.begin, access.end, mark);
      else
        read(access.begin, access.end, mark);
    }
  return found;
}

void forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  ranges().erase(ranges().lower_bound(begin), ranges().lower_bound(end));
}

void tell(const Race& race) {
  static auto* known = new std::set<std::tuple<void*, int, void*, int, bool>>;
  static auto* told = new std::set<std::tuple<std::string, std::string, bool>>;
  static std::mutex lock;
  const Place &one = race.later_place, &other = race.earlier_place;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (told->size() >= MOST || !known->emplace(one.code, one.instruction, other.code, other.instruction, race.is_reused).second) return;
  }
  const std::string later = text_of(one), earlier = text_of(other);  // takes Python's lock, under which others come here
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!told->emplace(later, earlier, race.is_reused).second) return;
  }
  const char* rank = getenv("RANK");
  std::string text = std::string("simulated GPU: ") + (rank ? "rank " + std::string(rank) + ": " : "") + "a wait is missing: " + race.later +
                     " at " + later + " " + race.what + ". Nothing orders it after " + race.earlier + " at " + earlier + ", which " +
                     (race.earlier_writes ? "writes" : "reads") + " the same memory. " + fix_of(race, later, earlier);
  fputs(wrapped(text).c_str(), stderr);
}
