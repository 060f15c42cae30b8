// Streams and events. A piece of work is done as late as its stream lets it: when the host, or what the host waits for,
// waits for it. So whoever forgets to wait computes with what was there before, in every run.
//
// The thread that waits does the work, in the order of the streams. What may wait for other processes, a collective, is
// done in a thread of its stream, so that several can. As other processes wait for it, too, the stream begins with it when
// the host waits for any other, and when the process has computed for a while: it meets the others, and its result stays
// beside until somebody waits for it. And all that is queued is done when the threads of the host sleep outside of this
// runtime.
#include "streams.h"

#include "lines.h"
#include "pinned.h"
#include "races.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

thread_local int current_device = 0;
thread_local bool in_work = false;

namespace {

const size_t LONGEST_QUEUE = 1000;
const int INTERVAL = 5000, LOOKS = 3;     // microseconds between looks at the host's threads; so many find them asleep
const double PATIENCE = 1;                // seconds of processor time until a stream begins with a collective
const int ASKED = 200, ASKED_IN_VAIN = 20;  // questions whether work is done before it is; one of a thread that only asks

struct Event {
  Stream* stream = nullptr;  // in which it was recorded last
  long piece = 0;
  Clock clock;
  std::shared_ptr<double> time = std::make_shared<double>(0);  // ms, when it was reached last
  int asked = 0;
  long launched = 0;
};

struct Host {
  std::set<pid_t> threads;  // that queue work
  int waiting = 0;          // of them, in this runtime
};
Host& host() {
  static Host* one = new Host;
  return *one;
}

thread_local long launched = 0;  // by this thread

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds; negative if there is no such thread.
double processor_time(clockid_t clock) {
  timespec time;
  return clock_gettime(clock, &time) ? -1 : time.tv_sec + time.tv_nsec * 1e-9;
}
clockid_t clock_of_thread(pid_t thread) { return (~clockid_t(thread) << 3) | 6; }

bool is_asleep(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  size_t name_ends = text.rfind(')');
  return name_ends != std::string::npos && text.compare(name_ends, 3, ") S") == 0;
}

void demand(Stream* stream, long piece, Lock& lock);
void begin_with_what_may_wait(Lock& lock);

// Do the work of a stream up to a piece, and before it what it waits for.
void run(Stream* stream, long piece, Lock& lock, const Stream* own = nullptr) {
  auto& all = streams();
  while (stream->done < piece && !all.unloaded) {
    if (stream->busy) {
      all.changed.wait(lock);
      continue;
    }
    auto& first = stream->queue.front();
    if (first.other && first.other->done < first.awaited) {
      run(first.other, first.awaited, lock, own);
      continue;
    }
    if (first.may_wait && stream != own) {
      demand(stream, stream->done + 1, lock);
      begin_with_what_may_wait(lock);
      all.changed.wait(lock);
      continue;
    }
    auto taken = std::move(first);
    stream->queue.pop_front();
    if (taken.work) {
      stream->busy = true;
      lock.unlock();
      const bool outer = std::exchange(in_work, true);
      taken.work();
      taken.work = nullptr;
      in_work = outer;
      lock.lock();
      stream->busy = false;
    }
    stream->done++;
    all.changed.notify_all();
  }
}

// Do a piece of work, and leave memory as it was: what it has written is written when the stream comes to it.
std::function<void()> done_beside(std::function<void()> work, const std::vector<Access>& accesses) {
  struct Written {
    char* where;
    std::vector<char> bytes;
  };
  std::vector<Written> all;
  for (const Access& one : accesses)
    if (auto* where = reinterpret_cast<char*>(one.begin); one.writes) all.push_back({where, {where, where + (one.end - one.begin)}});
  work();
  for (Written& one : all) std::swap_ranges(one.bytes.begin(), one.bytes.end(), one.where);
  return [all = std::move(all)] {
    for (const Written& one : all) std::copy(one.bytes.begin(), one.bytes.end(), one.where);
  };
}

// Do the work that others wait for, and what it waits for.
void begin(Stream* stream, Lock& lock) {
  const long number = stream->to_begin_with;
  run(stream, number - 1, lock, stream);
  while (stream->busy) streams().changed.wait(lock);
  if (stream->done >= number || streams().unloaded) return;
  stream->busy = true;
  auto& first = stream->queue.front();
  lock.unlock();
  first.work = done_beside(std::move(first.work), first.accesses);
  lock.lock();
  first.may_wait = false;
  stream->busy = false;
  stream->begun_with = number;
  streams().changed.notify_all();
}

void work_off(Stream* stream) {
  current_device = stream->device;
  pthread_setname_np(pthread_self(), "cuda-stream");  // as the flight recorder knows what acts for others
  Lock lock(streams().lock);
  const auto has_to_begin = [=] { return stream->to_begin_with > std::max(stream->done, stream->begun_with); };
  while (true) {
    stream->filled.wait(lock, [&] { return !streams().unloaded && (stream->demanded > stream->done || has_to_begin() || stream->ends); });
    if (stream->demanded > stream->done)
      run(stream, stream->demanded, lock, stream);
    else if (has_to_begin())
      begin(stream, lock);
    else
      break;
  }
  stream->has_thread = false;
}

void wake(Stream* stream) {
  if (!std::exchange(stream->has_thread, true)) std::thread(work_off, stream).detach();
  stream->filled.notify_one();
}

// Have a stream's thread do its work up to a piece.
void demand(Stream* stream, long piece, Lock&) {
  if (stream->demanded >= piece || stream->done >= piece) return;
  stream->demanded = piece;
  wake(stream);
}

void begin_with_what_may_wait(Stream* stream) {
  const long piece = stream->last_that_may_wait;
  if (std::max({stream->done, stream->demanded, stream->to_begin_with}) >= piece) return;
  stream->to_begin_with = piece;
  wake(stream);
}

void begin_with_what_may_wait(Lock&) {
  for (Stream* one : streams().all) begin_with_what_may_wait(one);
}

void demand_all(Lock& lock) {
  for (Stream* one : streams().all) demand(one, one->queued, lock);
}

// Wait in a thread of the host.
void run_for_host(Stream* stream, long piece, Lock& lock) {
  if (stream->done >= piece) return;
  host().threads.insert(gettid());
  host().waiting++;
  run(stream, piece, lock);
  host().waiting--;
}

void remember(const Clock& clock, Lock& lock) {
  streams().seen.add(clock);
  lift_guards(streams().seen, lock);
}

// Whether a stream has come so far, for who asks and does not wait. Who asks again and again gets an answer at last. The
// threads of ProcessGroupNCCL, of which Python knows nothing, ask for no one.
bool has_come(Stream* stream, long piece, const Clock& clock, int& asked, long& launched_before, Lock& lock) {
  const bool is_asking = is_known_to_python();
  if (stream->done >= piece || streams().unloaded) {
    if (is_asking) remember(clock, lock);
    return true;
  }
  if (is_asking && (asked += std::exchange(launched_before, launched) == launched ? ASKED_IN_VAIN : 1) >= ASKED) demand(stream, piece, lock);
  return false;
}

// Looks from time to time whether the host's threads sleep. One that wants to run and gets no processor does not.
void watch() {
  pthread_setname_np(pthread_self(), "cuda-watch");  // as that of a stream's thread
  std::map<pid_t, double> before;
  for (int looks = 0;;) {
    usleep(INTERVAL);
    Lock lock(streams().lock);
    if (streams().unloaded) return;
    auto& all = streams().all;
    const bool is_pending = std::any_of(all.begin(), all.end(), [](Stream* one) { return std::max(one->done, one->demanded) < one->queued; });
    if (!is_pending) {
      looks = 0;
      continue;
    }
    const double computed = processor_time(CLOCK_PROCESS_CPUTIME_ID);
    for (Stream* one : all)
      for (const auto& piece : one->queue)
        if (one->last_that_may_wait > one->done && piece.may_wait && computed - piece.queued_at > PATIENCE) begin_with_what_may_wait(one);
    bool is_idle = !host().waiting;
    std::map<pid_t, double> after;
    for (pid_t thread : std::set<pid_t>(host().threads)) {
      double time = processor_time(clock_of_thread(thread));
      if (time < 0)
        host().threads.erase(thread);
      else
        after[thread] = time;
    }
    is_idle = is_idle && after == before && std::all_of(after.begin(), after.end(), [](const auto& one) { return is_asleep(one.first); });
    before = after;
    looks = is_idle ? looks + 1 : 0;
    if (looks >= LOOKS) demand_all(lock);
  }
}

// The host waits, as long as there is one of these. The caller holds the lock.
struct HostWait {
  const pid_t thread = gettid();
  explicit HostWait(Stream* stream) { streams().waits[thread] = stream; }
  ~HostWait() { streams().waits.erase(thread); }
};

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void push(Stream* stream, Stream::Piece piece) {
  if (stream->number == SIZE_MAX) stream->number = streams().used++;
  stream->queue.push_back(std::move(piece));
  stream->queued++;
  stream->asked = 0;
  stream->clock.of(stream->number) = stream->queued;
}

// A process that leaves takes its GPU's work with it, before what the work is made of is destroyed. What is done by then
// on a GPU is done here. A kernel may be in the midst of its work; one that waits for another rank would do so for ever.
void unload() {
  Lock lock(streams().lock);
  demand_all(lock);
  streams().changed.wait_for(lock, std::chrono::milliseconds(200), [] {
    auto& all = streams().all;
    return std::all_of(all.begin(), all.end(), [](Stream* one) { return one->done == one->queued; });
  });
  streams().unloaded = true;
  streams().changed.notify_all();
}

}  // namespace

long& Clock::of(size_t stream) {
  if (stream >= pieces.size()) pieces.resize(stream + 1);
  return pieces[stream];
}

void Clock::add(const Clock& other) {
  if (pieces.size() < other.pieces.size()) pieces.resize(other.pieces.size());
  for (size_t i = 0; i < other.pieces.size(); ++i) pieces[i] = std::max(pieces[i], other.pieces[i]);
}

Streams& streams() {
  static Streams* one = new Streams;
  return *one;
}

Stream* make_stream(int device, int priority) {
  Lock lock(streams().lock);
  streams().all.push_back(new Stream{device, priority});
  return streams().all.back();
}

Stream* stream_of(void* handle) {
  // cudaStreamLegacy and cudaStreamPerThread are 1 and 2
  if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  Lock lock(streams().lock);
  auto& found = streams().defaults[current_device];
  if (!found) streams().all.push_back(found = new Stream{current_device, 0});
  return found;
}

// What a thread of the host waits for: 0, nothing; 1, a stream, by its device and handle; 2, a whole device.
extern "C" int simulated_gpu_wait_of(pid_t thread, int* device, void** handle) {
  Lock lock(streams().lock);
  auto found = streams().waits.find(thread);
  if (found == streams().waits.end()) return 0;
  if (!found->second) return 2;
  *device = found->second->device;
  *handle = streams().defaults[*device] == found->second ? nullptr : found->second;
  return 1;
}

void wait_for(Stream* stream) {
  Lock lock(streams().lock);
  HostWait wait(stream);
  const Clock clock = stream->clock;
  run_for_host(stream, stream->queued, lock);
  remember(clock, lock);
}

void wait_until_idle(int device) {
  Lock lock(streams().lock);
  HostWait wait(nullptr);
  std::vector<Stream*> all;
  std::copy_if(streams().all.begin(), streams().all.end(), std::back_inserter(all), [=](Stream* one) { return one->device == device; });
  // The operation that was queued last is done first, if no stream orders it; moments are taken when all are done.
  std::sort(all.begin(), all.end(), [](Stream* one, Stream* other) { return one->queued_last > other->queued_last; });
  for (Stream* one : all) {
    const Clock clock = one->clock;
    run_for_host(one, one->queued, lock);
    remember(clock, lock);
  }
}

void start_what_may_wait() {
  Lock lock(streams().lock);
  begin_with_what_may_wait(lock);
}

void wait_until_loadable(int device) {
  Lock lock(streams().lock);
  HostWait wait(nullptr);
  begin_with_what_may_wait(lock);
  host().waiting++;
  streams().changed.wait(lock, [=] {
    auto& all = streams().all;
    return std::none_of(all.begin(), all.end(), [=](Stream* one) {
      return one->device == device && one->last_that_may_wait > std::max(one->done, one->begun_with) && !streams().unloaded;
    });
  });
  host().waiting--;
}

void enqueue(void* handle, std::function<void()> work, const Operation& operation, bool may_wait) {
  static std::once_flag first;
  std::call_once(first, [] {
    atexit(unload);
    std::thread(watch).detach();
  });
  Stream* stream = stream_of(handle);
  const Place place = operation.name ? find_place() : Place{};
  std::vector<Race> races;
  launched++;
  {
    Lock lock(streams().lock);
    if (streams().unloaded) return;
    host().threads.insert(gettid());
    stream->clock.add(streams().seen);
    push(stream, {std::move(work), may_wait});
    if (may_wait) {
      stream->queue.back().queued_at = processor_time(CLOCK_PROCESS_CPUTIME_ID);
      stream->queue.back().accesses = operation.accesses;
      stream->last_that_may_wait = stream->queued;
      if (host().waiting) begin_with_what_may_wait(stream);
    }
    if (operation.name) {
      stream->queued_last = ++streams().operations;
      races = find_races(operation, {stream->number, stream->queued}, place, stream->clock);
    }
    for (const Access& one : operation.accesses)
      if (one.storage_end) guard(one, {stream->number, stream->queued}, operation, place);
    if (stream->queue.size() > LONGEST_QUEUE) demand(stream, stream->queued, lock);  // another rank may need what the host does next
  }
  for (const Race& race : races) tell(race);
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(make_stream(current_device, priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Stream* one = stream_of(stream);
  Lock lock(streams().lock);
  demand(one, one->queued, lock);
  one->ends = true;
  one->filled.notify_one();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return *priority = stream_of(stream)->priority, cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  wait_for(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Stream* one = stream_of(stream);
  static thread_local long launched_before = 0;
  Lock lock(streams().lock);
  return has_come(one, one->queued, one->clock, one->asked, launched_before, lock) ? cudaSuccess : told(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  Stream* one = stream_of(stream);
  Event* event = event_of(handle);
  Lock lock(streams().lock);
  one->clock.add(event->clock);
  if (event->stream && event->stream != one && event->stream->done < event->piece)
    push(one, {nullptr, false, event->stream, event->piece});
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  enqueue(stream, [=] { callback(stream, cudaSuccess, data); }, {}, true);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  enqueue(stream, [=] { function(data); }, {}, true);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  Stream* one = stream_of(stream);
  Event* event = event_of(handle);
  Lock lock(streams().lock);
  one->clock.add(streams().seen);
  push(one, {[time = event->time] { *time = now(); }, false});
  event->stream = one;
  event->piece = one->queued;
  event->clock = one->clock;
  event->asked = 0;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Event* event = event_of(handle);
  Lock lock(streams().lock);
  const bool is_done = !event->stream || has_come(event->stream, event->piece, event->clock, event->asked, event->launched, lock);
  return is_done ? cudaSuccess : told(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event* event = event_of(handle);
  Lock lock(streams().lock);
  if (!event->stream) return cudaSuccess;
  const Clock clock = event->clock;
  run_for_host(event->stream, event->piece, lock);
  remember(clock, lock);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Lock lock(streams().lock);
  for (Event* event : {event_of(start), event_of(end)}) {
    if (!event->stream) return told(cudaErrorInvalidResourceHandle);
    if (event->stream->done < event->piece) return told(cudaErrorNotReady);
  }
  *ms = static_cast<float>(*event_of(end)->time - *event_of(start)->time);
  return cudaSuccess;
}
}
