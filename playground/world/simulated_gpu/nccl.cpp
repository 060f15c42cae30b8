// NCCL between processes of this machine, over sockets of the kernel's: torch's own ProcessGroupNCCL runs on top of it.
//
// The rules are NCCL's. The messages of a communicator happen in the order in which they were issued; a send holds its
// stream until the receiver has taken it, a receive until the sender has come, unless they are issued as one group. What
// does not match on all ranks, or waits for a rank that has died, waits until the communicator is aborted. Two ranks
// share a device only where NCCL_MULTI_RANK_GPU_ENABLE is set.
#include "lines.h"
#include "runtime.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <nccl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct ncclComm {
  std::string token;
  int rank, size, device, splits = 0;
  std::vector<int> to, from;  // a socket per peer: data one way, acknowledgements the other
  std::atomic<bool> aborted{false};
  std::mutex lock;
  std::condition_variable changed;
  long issued = 0, done = 0;
  std::map<int, std::pair<const void*, double>> factors;  // of PREMUL_SUM: where on the device, or what
};

namespace {

using Bytes = std::vector<char>;
enum Kind : int { P2P, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GOODBYE };
const char* const NAMES[]{"ncclSend", "ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter"};
static_assert(std::size(NAMES) == GOODBYE, "a name for each kind but the last, which is no call");

struct Header {
  int kind, dtype, op, root;
  size_t bytes;
  bool operator==(const Header& other) const { return !memcmp(this, &other, sizeof other); }
};

char last_error[1024];  // of the process: torch may ask in another thread

ncclResult_t wrong(ncclResult_t result, const std::string& text) {
  snprintf(last_error, sizeof last_error, "%s", text.c_str());
  return result;
}

// Wait as long as a kernel spins: until the communicator is aborted.
bool hang(ncclComm* comm) {
  while (!comm->aborted) usleep(5000);
  return false;
}

bool ready(ncclComm* comm, int socket, short events) {
  pollfd one{socket, events, 0};
  while (!comm->aborted)
    if (poll(&one, 1, 20) > 0) return true;
  return false;
}

bool write_all(ncclComm* comm, int socket, const void* data, size_t size) {
  for (auto at = static_cast<const char*>(data); size;) {
    if (!ready(comm, socket, POLLOUT)) return false;
    ssize_t count = send(socket, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno != EAGAIN) return hang(comm);
    if (count > 0) {
      at += count;
      size -= count;
    }
  }
  return true;
}

bool read_all(ncclComm* comm, int socket, void* data, size_t size) {
  for (auto at = static_cast<char*>(data); size;) {
    if (!ready(comm, socket, POLLIN)) return false;
    ssize_t count = recv(socket, at, size, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN)) return hang(comm);
    if (count > 0) {
      at += count;
      size -= count;
    }
  }
  return true;
}

bool send_message(ncclComm* comm, int peer, const Header& header, const void* data) {
  return write_all(comm, comm->to[peer], &header, sizeof header) && write_all(comm, comm->to[peer], data, header.bytes);
}

std::string describe(const Header& one) {
  static const char* const kinds[] = {"a message", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "destroy"};
  static const char* const types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"};
  static const char* const ops[] = {"sum", "product", "max", "min", "average"};
  static_assert(std::size(kinds) == GOODBYE + 1 && std::size(types) == ncclBfloat16 + 1 && std::size(ops) == ncclAvg + 1,
                "a word for each value");
  std::string text = kinds[one.kind], bytes = " of " + std::to_string(one.bytes) + " bytes";
  if (one.kind == P2P || one.kind == GOODBYE) return text + (one.kind == P2P ? bytes : "");
  text += bytes + (one.dtype < static_cast<int>(std::size(types)) ? std::string(" of ") + types[one.dtype] : "");
  if (one.kind == ALL_REDUCE || one.kind == REDUCE || one.kind == REDUCE_SCATTER) text += std::string(", ") + ops[one.op];
  return text + (one.kind == REDUCE || one.kind == BROADCAST ? ", root " + std::to_string(one.root) : "");
}

// Receive what the peer sent for the same operation; one for another never matches.
bool receive_message(ncclComm* comm, int peer, const Header& expected, void* data) {
  Header header;
  if (!read_all(comm, comm->from[peer], &header, sizeof header)) return false;
  if (!(header == expected)) {
    const std::string text = "simulated NCCL: rank " + std::to_string(comm->rank) + " has " + describe(expected) + ", and rank " +
                             std::to_string(peer) + " has " + describe(header) +
                             ": both wait for ever, where NCCL may also give wrong values";
    fputs(wrapped(text).c_str(), stderr);
    return hang(comm);
  }
  return read_all(comm, comm->from[peer], data, header.bytes);
}

// The meeting of a communicator's ranks

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string path = "simulated-nccl-" + name;  // abstract: sun_path begins with a zero
  memcpy(address.sun_path + 1, path.data(), path.size());
  length = offsetof(sockaddr_un, sun_path) + 1 + path.size();
  return address;
}

int listen_at(const std::string& name) {
  socklen_t length;
  auto address = address_of(name, length);
  int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(socket, reinterpret_cast<sockaddr*>(&address), length)) perror("simulated NCCL: bind");
  listen(socket, 256);
  return socket;
}

int connect_to(const std::string& name) {
  socklen_t length;
  auto address = address_of(name, length);
  int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  while (connect(socket, reinterpret_cast<sockaddr*>(&address), length)) usleep(2000);
  return socket;
}

void put(int socket, const void* data, size_t size) { send(socket, data, size, MSG_NOSIGNAL); }
void take(int socket, void* data, size_t size) { recv(socket, data, size, MSG_WAITALL); }

// What every rank tells, by rank: rank 0 collects and hands out. It waits for all of them, however long.
template <class Told>
std::vector<Told> exchange(const std::string& name, int rank, int size, Told own) {
  std::vector<Told> all(size);
  all[rank] = own;
  if (rank == 0) {
    int listener = listen_at(name);
    std::vector<int> sockets;
    for (int i = 1; i < size; ++i) {
      sockets.push_back(accept(listener, nullptr, nullptr));
      int peer;
      take(sockets.back(), &peer, sizeof peer);
      take(sockets.back(), &all[peer], sizeof(Told));
    }
    for (int socket : sockets) {
      put(socket, all.data(), size * sizeof(Told));
      close(socket);
    }
    close(listener);
  } else {
    int socket = connect_to(name);
    put(socket, &rank, sizeof rank);
    put(socket, &own, sizeof own);
    take(socket, all.data(), size * sizeof(Told));
    close(socket);
  }
  return all;
}

ncclResult_t connect_ranks(ncclComm_t* result, const std::string& token, int rank, int size) {
  int device = 0;
  cudaGetDevice(&device);
  auto devices = exchange(token + "-devices", rank, size, device);
  const char* shares = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (int peer = 0; peer < size && !(shares && *shares == '1'); ++peer)
    if (peer != rank && devices[peer] == device)
      return wrong(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                                         std::to_string(peer) + " both on CUDA device " + std::to_string(device + 1) + "000");
  auto* comm = new ncclComm{token, rank, size, device};
  comm->to.assign(size, -1);
  comm->from.assign(size, -1);
  int listener = listen_at(token + "-" + std::to_string(rank));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    comm->to[peer] = connect_to(token + "-" + std::to_string(peer));
    put(comm->to[peer], &rank, sizeof rank);
  }
  for (int i = 1; i < size; ++i) {
    int socket = accept(listener, nullptr, nullptr), peer;
    take(socket, &peer, sizeof peer);
    comm->from[peer] = socket;
  }
  close(listener);
  *result = comm;
  return ncclSuccess;
}

// Arithmetic

size_t size_of(ncclDataType_t dtype) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  static_assert(std::size(sizes) == ncclFloat8e5m2 + 1, "a size for each type");
  return sizes[dtype];
}

template <class Function>
void with_type(ncclDataType_t dtype, Function function) {
  switch (dtype) {
    case ncclInt8: return function(int8_t());
    case ncclUint8: return function(uint8_t());
    case ncclInt32: return function(int32_t());
    case ncclUint32: return function(uint32_t());
    case ncclInt64: return function(int64_t());
    case ncclUint64: return function(uint64_t());
    case ncclFloat16: return function(c10::Half());
    case ncclFloat32: return function(float());
    case ncclFloat64: return function(double());
    case ncclBfloat16: return function(c10::BFloat16());
    default:
      fprintf(stderr, "simulated NCCL: dtype %d is not simulated\n", dtype);
      abort();
  }
}

void combine(Bytes& total, const Bytes& more, ncclDataType_t dtype, int op) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    auto* a = reinterpret_cast<T*>(total.data());
    auto* b = reinterpret_cast<const T*>(more.data());
    for (size_t i = 0; i < total.size() / sizeof(T); ++i)
      a[i] = op == ncclProd ? T(a[i] * b[i]) : op == ncclMax ? std::max(a[i], b[i]) : op == ncclMin ? std::min(a[i], b[i]) : T(a[i] + b[i]);
  });
}

void scale(Bytes& values, ncclDataType_t dtype, double factor, int divisor) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    auto* a = reinterpret_cast<T*>(values.data());
    for (size_t i = 0; i < values.size() / sizeof(T); ++i) a[i] = divisor > 1 ? T(a[i] / T(divisor)) : T(a[i] * T(factor));
  });
}

double read_factor(ncclComm* comm, int op, ncclDataType_t dtype) {
  auto [where, value] = comm->factors.at(op);
  if (where) with_type(dtype, [&, where = where, &value = value](auto zero) { value = double(*static_cast<const decltype(zero)*>(where)); });
  return value;
}

// A collective: all bring what they have to rank 0, which works it out and sends everyone its part.
bool run_collective(ncclComm* comm, Header header, const void* input, size_t in, void* output, size_t out, ncclDataType_t dtype) {
  const bool reduces = header.kind == ALL_REDUCE || header.kind == REDUCE || header.kind == REDUCE_SCATTER;
  Bytes own(static_cast<const char*>(input), static_cast<const char*>(input) + in);
  if (reduces && header.op >= ncclNumOps) scale(own, dtype, read_factor(comm, header.op, dtype), 1);
  if (header.op >= ncclNumOps) header.op = ncclSum;
  header.bytes = in;
  Bytes result;
  if (comm->rank == 0) {
    std::vector<Bytes> all(comm->size, Bytes(in));
    all[0] = own;
    for (int peer = 1; peer < comm->size; ++peer)
      if (!receive_message(comm, peer, header, all[peer].data())) return false;
    if (reduces) {
      result = all[0];
      for (int peer = 1; peer < comm->size; ++peer) combine(result, all[peer], dtype, header.op);
      if (header.op == ncclAvg) scale(result, dtype, 1, comm->size);
    } else if (header.kind == BROADCAST) {
      result = all[header.root];
    } else {
      for (const Bytes& one : all) result.insert(result.end(), one.begin(), one.end());
    }
    header.bytes = out;
    for (int peer = 1; peer < comm->size; ++peer)
      if (!send_message(comm, peer, header, result.data() + (header.kind == REDUCE_SCATTER ? peer * out : 0))) return false;
    result.resize(out);
  } else {
    if (!send_message(comm, 0, header, own.data())) return false;
    header.bytes = out;
    result.resize(out);
    if (!receive_message(comm, 0, header, result.data())) return false;
  }
  if (header.kind != REDUCE || comm->rank == header.root) memcpy(output, result.data(), out);
  return true;
}

struct Message {
  bool sends;
  void* data;
  size_t bytes;
  int peer;
};

// The messages of a group: to and from every peer at once, each in its order.
void run_messages(ncclComm* comm, const std::vector<Message>& messages) {
  std::map<std::pair<int, bool>, std::vector<Message>> lanes;
  for (const Message& one : messages) lanes[{one.peer, one.sends}].push_back(one);
  if (auto own = lanes.find({comm->rank, true}); own != lanes.end()) {
    auto& taken = lanes[{comm->rank, false}];
    if (taken.size() != own->second.size()) return void(hang(comm));
    for (size_t i = 0; i < taken.size(); ++i) memmove(taken[i].data, own->second[i].data, taken[i].bytes);
  }
  std::vector<std::thread> threads;
  for (const auto& [lane, all] : lanes) {
    if (lane.first == comm->rank) {
      if (!lanes.count({comm->rank, true})) hang(comm);
      continue;
    }
    threads.emplace_back([comm, &all = all] {
      pthread_setname_np(pthread_self(), "NCCL message");
      char taken = 1;
      for (const Message& one : all) {
        Header header{P2P, 0, 0, 0, one.bytes};
        bool fine = one.sends ? send_message(comm, one.peer, header, one.data) && read_all(comm, comm->to[one.peer], &taken, 1)
                              : receive_message(comm, one.peer, header, one.data) && write_all(comm, comm->from[one.peer], &taken, 1);
        if (!fine) return;
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Put an operation of a communicator into a stream. It waits there for those that were issued before it.
void issue(ncclComm* comm, cudaStream_t stream, std::function<void()> work, const Operation& operation) {
  long turn = comm->issued++;
  auto in_turn = [=] {
    {
      std::unique_lock<std::mutex> lock(comm->lock);
      comm->changed.wait(lock, [&] { return comm->done == turn; });
    }
    if (!comm->aborted) work();
    std::lock_guard<std::mutex> lock(comm->lock);
    comm->done++;
    comm->changed.notify_all();
  };
  int caller_s;  // which may be another by the end of the group
  cudaGetDevice(&caller_s);
  cudaSetDevice(comm->device);
  enqueue(stream, in_turn, operation, true);
  cudaSetDevice(caller_s);
}

Access access_to(const void* data, size_t bytes, bool writes) {
  auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes, writes};
}

// What NCCL takes is memory of the communicator's GPU, or pinned: NCCL itself checks this if NCCL_CHECK_POINTERS is set, and
// a real GPU else stops at an illegal address, later.
ncclResult_t check(const char* call, const Access& bytes, ncclComm* comm) {
  cudaPointerAttributes memory;
  if (bytes.begin == bytes.end) return ncclSuccess;
  cudaPointerGetAttributes(&memory, reinterpret_cast<const void*>(bytes.begin));
  const std::string buffer = std::string(call) + " : " + (bytes.writes ? "recvbuff" : "sendbuff");
  if (memory.type == cudaMemoryTypeUnregistered) return wrong(ncclInvalidArgument, buffer + " is in the memory of the CPU");
  if (memory.type == cudaMemoryTypeDevice && memory.device != comm->device)
    return wrong(ncclInvalidArgument, buffer + " is on device " + std::to_string(memory.device) + ", and the communicator is of device " +
                                          std::to_string(comm->device));
  return ncclSuccess;
}

struct Grouped {
  ncclComm* comm;
  cudaStream_t stream;
  std::vector<Message> messages;
};

// Calls of groups that have not ended, of all threads: who leaves then is told that they never began.
struct Unbegun {
  const int* depth;  // the thread's
  const char* call;
  Place place;
};
std::mutex unbegun_lock;
std::vector<Unbegun>& unbegun() {
  static auto* all = new std::vector<Unbegun>;
  return *all;
}

thread_local int depth = 0;
thread_local std::vector<Grouped> grouped;
thread_local std::vector<std::function<void()>> collectives;  // of the group: they begin at its end

void tell_unbegun() {
  std::vector<Unbegun> all;
  {
    std::lock_guard<std::mutex> lock(unbegun_lock);
    std::swap(all, unbegun());
  }
  const char* rank = getenv("RANK");
  for (const Unbegun& one : all) {
    std::string text = std::string("simulated GPU: ") + (rank ? "rank " + std::string(rank) + ": " : "") + "a group of NCCL calls has no end: " +
                       one.call + " at " + text_of(one.place) + " has never begun.\n";
    fputs(text.c_str(), stderr);
  }
}

void await_end(const char* call) {
  static std::once_flag first;
  std::call_once(first, [] { atexit(tell_unbegun); });
  const Place place = find_place();
  std::lock_guard<std::mutex> lock(unbegun_lock);
  unbegun().push_back({&depth, call, place});
}

void end_all() {
  std::lock_guard<std::mutex> lock(unbegun_lock);
  std::erase_if(unbegun(), [](const Unbegun& one) { return one.depth == &depth; });
}

ncclResult_t add_message(Message message, ncclComm* comm, cudaStream_t stream) {
  if (message.peer < 0 || message.peer >= comm->size) return wrong(ncclInvalidArgument, "invalid peer");
  if (auto error = check(message.sends ? "ncclSend" : "ncclRecv", access_to(message.data, message.bytes, !message.sends), comm)) return error;
  ncclGroupStart();
  auto found = std::find_if(grouped.begin(), grouped.end(), [&](Grouped& one) { return one.comm == comm && one.stream == stream; });
  if (found == grouped.end()) found = grouped.insert(found, {comm, stream, {}});
  found->messages.push_back(message);
  if (depth > 1) await_end(message.sends ? "ncclSend" : "ncclRecv");
  return ncclGroupEnd();
}

ncclResult_t add_collective(Kind kind, const void* input, size_t in, void* output, size_t out, ncclDataType_t dtype, int op,
                            int root, ncclComm* comm, cudaStream_t stream) {
  in *= size_of(dtype), out *= size_of(dtype);
  Operation operation{NAMES[kind], {}, [=](size_t) { return std::to_string(out) + " bytes"; }};
  if (kind != BROADCAST || comm->rank == root) operation.accesses.push_back(access_to(input, in, false));
  if (kind != REDUCE || comm->rank == root) operation.accesses.push_back(access_to(output, out, true));
  for (const Access& bytes : operation.accesses)
    if (auto error = check(NAMES[kind], bytes, comm)) return error;
  ncclGroupStart();
  collectives.push_back([=] {
    issue(comm, stream, [=] { run_collective(comm, {kind, dtype, op, root, 0}, input, in, output, out, dtype); }, operation);
  });
  if (depth > 1) await_end(NAMES[kind]);
  return ncclGroupEnd();
}

void wait_until_done(ncclComm* comm) {
  start_what_may_wait();
  std::unique_lock<std::mutex> lock(comm->lock);
  comm->changed.wait(lock, [&] { return comm->done == comm->issued; });
}

void close_all(ncclComm* comm) {
  for (auto* sockets : {&comm->to, &comm->from})
    for (int socket : *sockets)
      if (socket >= 0) close(socket);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%08x%08x", random(), random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return connect_ranks(comm, id.internal, rank, size);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return connect_ranks(comm, id.internal, rank, size);
}

// Several devices of one process: a rank each.
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([=] {
      cudaSetDevice(devices ? devices[rank] : rank);
      connect_ranks(&comms[rank], id.internal, rank, count);
    });
  for (auto& thread : threads) thread.join();
  return ncclSuccess;
}

// A rank's place in a split: ranks of one color are a communicator, in the order of their keys.
struct Choice {
  int color, key;
};

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm, ncclConfig_t*) {
  std::string name = parent->token + "." + std::to_string(parent->splits++);
  auto all = exchange(name, parent->rank, parent->size, Choice{color, key});
  *comm = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < parent->size; ++rank)
    if (all[rank].color == color) members.push_back({all[rank].key, rank});
  std::sort(members.begin(), members.end());
  int rank = std::find(members.begin(), members.end(), std::make_pair(key, parent->rank)) - members.begin();
  return connect_ranks(comm, name + "." + std::to_string(color), rank, members.size());
}

// A communicator that is destroyed waits for its peers, as NCCL's proxy threads do.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  tell_unbegun();
  if (comm->aborted) return ncclSuccess;
  wait_until_done(comm);
  Header goodbye{GOODBYE, 0, 0, 0, 0};
  for (int socket : comm->to)
    if (socket >= 0) put(socket, &goodbye, sizeof goodbye);
  for (int socket : comm->from)
    if (socket >= 0) take(socket, &goodbye, sizeof goodbye);
  close_all(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return wait_until_done(comm), ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  tell_unbegun();
  comm->aborted = true;
  wait_until_done(comm);
  close_all(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return *device = comm->device, ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { return *handle = nullptr, ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** pointer, size_t size) { return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage" : result == ncclInvalidArgument ? "invalid argument" : "an error of the simulated NCCL";
}
const char* ncclGetLastError(ncclComm_t) { return last_error; }

ncclResult_t ncclGroupStart() { return ++depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
  if (!depth) return wrong(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--depth) return ncclSuccess;
  end_all();
  for (auto& begin : std::exchange(collectives, {})) begin();
  for (Grouped& one : std::exchange(grouped, {})) {
    Operation operation{one.messages[0].sends ? "ncclSend" : "ncclRecv", {}, [&](size_t i) { return std::to_string(one.messages[i].bytes) + " bytes"; }};
    for (const Message& each : one.messages) {
      operation.accesses.push_back(access_to(each.data, each.bytes, !each.sends));
      operation.accesses.back().tensor = operation.accesses.size() - 1;
    }
    issue(one.comm, one.stream, [one] { run_messages(one.comm, one.messages); }, operation);
  }
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add_message({true, const_cast<void*>(data), count * size_of(dtype), peer}, comm, stream);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add_message({false, data, count * size_of(dtype), peer}, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * size_of(dtype);
  ncclGroupStart();
  for (int peer = 0; peer < comm->size; ++peer) {
    ncclSend(static_cast<const char*>(in) + peer * bytes, count, dtype, peer, comm, stream);
    ncclRecv(static_cast<char*>(out) + peer * bytes, count, dtype, peer, comm, stream);
  }
  return ncclGroupEnd();
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add_collective(ALL_REDUCE, in, count, out, count, dtype, op, 0, comm, stream);
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return add_collective(REDUCE, in, count, out, count, dtype, op, root, comm, stream);
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  // what the others bring is not read, and may be no memory at all
  return add_collective(BROADCAST, comm->rank == root ? in : out, count, out, count, dtype, 0, root, comm, stream);
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, dtype, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return add_collective(ALL_GATHER, in, count, out, count * comm->size, dtype, 0, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add_collective(REDUCE_SCATTER, in, count * comm->size, out, count, dtype, op, 0, comm, stream);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype, ncclScalarResidence_t where, ncclComm_t comm) {
  *op = static_cast<ncclRedOp_t>(ncclNumOps + comm->factors.size());
  double value = 0;
  if (where == ncclScalarHostImmediate) with_type(dtype, [&](auto zero) { value = double(*static_cast<decltype(zero)*>(scalar)); });
  comm->factors[*op] = {where == ncclScalarDevice ? scalar : nullptr, value};
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
}
