// What the parts of the simulated GPU ask of its runtime.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Bytes that a piece of work reads or writes.
struct Access {
  uintptr_t begin, end;
  bool writes;
  size_t tensor = 0;    // by which number its operation describes it
  bool is_new = false;  // memory that was given to the work's result, and is no tensor's yet
  uintptr_t storage_begin = 0, storage_end = 0;  // of pinned memory, that the host has to leave alone until then
  std::function<bool()> is_freed = {};  // whether its tensor's memory has been given back since; empty if that is not known
};

// What a piece of work is, for who asks whether it has waited for what it needs.
struct Operation {
  const char* name = nullptr;
  std::vector<Access> accesses;
  std::function<std::string(size_t tensor)> describe;
};

// Put work into a stream (0: the default stream of the thread's device), after all that was put there before. The caller
// goes on, and the work is done as late as the streams allow: when somebody waits for it. Work that may wait for other
// processes is done in the stream's own thread.
void enqueue(void* stream, std::function<void()> work, const Operation& operation = {}, bool may_wait = false);

// Begin with the work that others may wait for, as a GPU does at once.
void start_what_may_wait();

// Wait until nothing that may wait is left to do on a device, as the first launch of a kernel does under CUDA's lazy loading.
void wait_until_loadable(int device);

// What torch.cuda._sleep does, in the stream that torch takes for the current one.
extern void (*sleep_in_stream)(long cycles);
