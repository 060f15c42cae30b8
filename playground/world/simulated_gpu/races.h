// Which work reads and writes which memory, and what of it no wait orders.
#pragma once
#include "lines.h"
#include "streams.h"

// A piece of work in a stream.
struct Work {
  size_t stream;
  long piece;
};

// Two accesses of the same memory, one of them a write at least, in no order.
struct Race {
  std::string later, what;  // "aten::add", "reads a float32 tensor of shape [4]"
  Place later_place;
  std::string earlier;  // "ncclAllReduce"
  Place earlier_place;
  bool earlier_writes;
  bool is_reused = false;  // the earlier one is of a tensor from another stream, whose memory was freed and given out again
};

// Remember what a piece of work reads and writes, and find what it must have waited for and has not. The caller holds the
// lock of the streams.
std::vector<Race> find_races(const Operation& operation, const Work& work, const Place& place, const Clock& clock);

// Memory that is given back has been neither read nor written. The caller holds the lock of the streams.
void forget(uintptr_t begin, uintptr_t end);

// Count a race. The caller holds the lock of the streams.
void remember(const Race& race);

// Say it on stderr, once.
void tell(const Race& race);
