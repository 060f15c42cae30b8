// What is alive on each simulated GPU when it holds most: torch's caching allocator tells of each allocation, and whoever
// records names the line of the program that asks for it, and what tensors are for.
#include <c10/cuda/CUDACachingAllocator.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using namespace c10::cuda::CUDACachingAllocator;

// The kinds of playground.explain.memory that are known only at the end of a step: what is freed by then was for the
// step, and what backward leaves holds gradients.
const int64_t UNKNOWN = 0, GRADIENTS = 2, ACTIVATIONS = 4, OF_BACKWARD = 5, KINDS = 8;

struct Cause : c10::GatheredContext {
  int64_t line, kind;
};

struct Block {
  int64_t bytes, line, kind;
  uint64_t number;  // of the allocation
};

struct Device {
  std::unordered_map<size_t, std::shared_ptr<Block>> alive;  // by address
  std::vector<std::shared_ptr<Block>> freed;                 // since the peak, at which they were alive
  int64_t held = 0, asked = 0, peak = 0, peak_line = 0;      // bytes; asked: with what did not fit
  int64_t lacking = 0;                                       // what did not fit at the peak
  uint64_t number = 0, peak_number = 0, peaks = 0;

  void note_peak(int64_t line, int64_t missing) {
    asked = held + missing;
    peak = held;
    peak_line = line;
    lacking = missing;
    peak_number = number;
    ++peaks;
    freed.clear();
  }
};

std::mutex& lock() {
  static auto* one = new std::mutex;
  return *one;
}
std::map<int, Device>& devices() {
  static auto* all = new std::map<int, Device>;
  return *all;
}

int64_t (*find_cause)() = nullptr;  // the number of a line, times KINDS, plus a kind

std::shared_ptr<c10::GatheredContext> gather() {
  auto cause = std::make_shared<Cause>();
  const int64_t found = find_cause();
  cause->line = found / KINDS;
  cause->kind = found % KINDS;
  return cause;
}

void hear(const TraceEntry& entry) {  // the allocator's lock is held: nothing of Python's may be called
  std::lock_guard<std::mutex> guard(lock());
  Device& device = devices()[entry.device_];
  auto cause = std::dynamic_pointer_cast<Cause>(entry.context_);
  const int64_t line = cause ? cause->line : 0, bytes = entry.size_;
  if (entry.action_ == TraceEntry::ALLOC) {
    device.held += bytes;
    ++device.number;
    device.alive[entry.addr_] = std::make_shared<Block>(Block{bytes, line, cause ? cause->kind : UNKNOWN, device.number});
    if (device.held > device.asked) device.note_peak(line, 0);
  } else if (entry.action_ == TraceEntry::FREE_REQUESTED) {
    auto found = device.alive.find(entry.addr_);
    if (found == device.alive.end()) return;
    device.held -= found->second->bytes;
    if (found->second->number <= device.peak_number) device.freed.push_back(found->second);
    device.alive.erase(found);
  } else if (entry.action_ == TraceEntry::OOM) {
    if (device.held + bytes > device.asked) device.note_peak(line, bytes);
  }
}

// Older versions of torch have fewer arguments.
template <class Bool, class... More>
void record(Bool enabled, More... more) {
  if constexpr (requires { recordHistory(enabled, gather, 1, RecordContext::ALLOC, true, more...); })
    recordHistory(enabled, gather, 1, RecordContext::ALLOC, true, more...);
  else
    recordHistory(enabled, gather, 1, RecordContext::ALLOC, true);
}

}  // namespace

extern "C" {

// From now on, once CUDA is initialised.
void memory_record(int64_t (*cause)()) {
  find_cause = cause;
  record(true, std::vector<std::string>());
  attachAllocatorTraceTracker(hear);
}

void memory_stop() { record(false, std::vector<std::string>()); }

// Say what the block at this address is for.
void memory_mark(int device, size_t address, int64_t kind) {
  std::lock_guard<std::mutex> guard(lock());
  auto& alive = devices()[device].alive;
  if (auto found = alive.find(address); found != alive.end()) found->second->kind = kind;
}

// How often a device has held more than ever before, which changes what there is to mark.
uint64_t memory_peaks() {
  std::lock_guard<std::mutex> guard(lock());
  uint64_t peaks = 0;
  for (auto& [number, device] : devices()) peaks += device.peaks;
  return peaks;
}

// A step has ended.
void memory_end_step() {
  std::lock_guard<std::mutex> guard(lock());
  for (auto& [number, device] : devices()) {
    for (auto& block : device.freed)
      if (block->kind == UNKNOWN) block->kind = ACTIVATIONS;
    for (auto& [address, block] : device.alive)
      if (block->kind == OF_BACKWARD) block->kind = GRADIENTS;
  }
}

// The peak of a device, the line that brought it there, and what did not fit then; and rows of what was alive: line,
// kind, tensors and bytes. Returns the number of rows, of which as many are written as there is room for.
int64_t memory_read(int number, int64_t* peak, int64_t* rows, int64_t room) {
  std::lock_guard<std::mutex> guard(lock());
  Device& device = devices()[number];
  std::map<std::pair<int64_t, int64_t>, std::pair<int64_t, int64_t>> found;
  auto add = [&](const Block& block) {
    auto& [tensors, bytes] = found[{block.line, block.kind == OF_BACKWARD ? ACTIVATIONS : block.kind}];
    ++tensors;
    bytes += block.bytes;
  };
  for (auto& block : device.freed) add(*block);
  for (auto& [address, block] : device.alive)
    if (block->number <= device.peak_number) add(*block);
  peak[0] = device.peak;
  peak[1] = device.peak_line;
  peak[2] = device.lacking;
  for (auto& [key, value] : found) {
    if (room-- <= 0) break;
    *rows++ = key.first;
    *rows++ = key.second;
    *rows++ = value.first;
    *rows++ = value.second;
  }
  return found.size();
}
}
