// Streams: queues of work, of which a piece is done when somebody waits for it. And the order of work: what must come
// before what, whether or not it has been done.
#pragma once
#include "runtime.h"

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

using Lock = std::unique_lock<std::mutex>;

// By stream: how many pieces of its work come before.
struct Clock {
  std::vector<long> pieces;
  long& of(size_t stream);
  bool has(size_t stream, long piece) const { return stream < pieces.size() && pieces[stream] >= piece; }
  void add(const Clock& other);
};

struct Stream {
  // A piece of work, or a wait until another stream has come so far.
  struct Piece {
    std::function<void()> work;
    bool may_wait;
    Stream* other = nullptr;
    long awaited = 0;
    double queued_at = 0;  // seconds of the process's processor time, if it may wait
    std::vector<Access> accesses = {};
  };
  const int device, priority;
  size_t number = SIZE_MAX;  // in clocks, from its first piece of work on: torch makes many streams that nothing uses
  std::deque<Piece> queue = {};
  long queued = 0, done = 0, demanded = 0;                        // how many pieces
  long last_that_may_wait = 0, to_begin_with = 0, begun_with = 0;  // numbers of pieces: see `begin_with`
  long queued_last = 0;                                             // its last operation, by number among those of all streams
  bool busy = false, has_thread = false, ends = false;
  int asked = 0;  // how often the host has asked in vain whether it is done
  Clock clock = {};
  std::condition_variable filled = {};
};

// Never destroyed: streams' threads outlive static objects.
struct Streams {
  std::mutex lock;  // of all that is here, and of what is known of memory's accesses
  std::condition_variable changed;  // a piece of work was done
  size_t used = 0;  // numbers of streams
  long operations = 0;  // that were queued in all of them
  std::vector<Stream*> all;         // none is ever deleted: an event may name it
  std::map<int, Stream*> defaults;  // by device
  std::map<pid_t, Stream*> waits;   // of threads of the host: for a stream, or for a whole device
  Clock seen;                       // what the host has waited for
  bool unloaded = false;            // the process leaves: streams do nothing more, and no one waits for them
};

Streams& streams();
Stream* make_stream(int device, int priority);
Stream* stream_of(void* handle);

// Wait until a stream is done, or all of a device, and remember that the host has waited.
void wait_for(Stream* stream);
void wait_until_idle(int device);

// An error that cudaGetLastError gives, too.
cudaError_t told(cudaError_t error);

// The device of the calling thread.
extern thread_local int current_device;

// Whether the thread does a stream's work at the moment.
extern thread_local bool in_work;
