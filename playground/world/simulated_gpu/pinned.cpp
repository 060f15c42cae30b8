// The host's reads and writes are no calls, so pages are protected: who touches one too early is stopped by the kernel, told
// of, and goes on.
#include "pinned.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace {

struct Guard {
  uintptr_t begin, end, first_page, last_page;  // the pages between them
  bool may_read;
  Work work;
  std::string name, tensor;
  Place place;
};

// Never destroyed, as the streams.
std::vector<Guard>& guards() {
  static auto* all = new std::vector<Guard>;
  return *all;
}

const uintptr_t PAGE = sysconf(_SC_PAGESIZE);

void protect(const Guard& guard, int protection) { mprotect(reinterpret_cast<void*>(guard.first_page), guard.last_page - guard.first_page, protection); }

// The strictest last: several may have a page.
void protect_all() {
  for (bool may_read : {true, false})
    for (const Guard& one : guards())
      if (one.may_read == may_read) protect(one, may_read ? PROT_READ : PROT_NONE);
}

// Let the host use the pages of those that the function names, unless another guard has them, too.
template <class Function>
void lift(Function which) {
  auto& all = guards();
  auto kept = std::stable_partition(all.begin(), all.end(), [&](const Guard& one) { return !which(one); });
  if (kept == all.end()) return;
  for (auto one = kept; one != all.end(); ++one) protect(*one, PROT_READ | PROT_WRITE);
  all.erase(kept, all.end());
  protect_all();
}

struct sigaction before;

void stopped(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  std::vector<Race> races;
  bool is_guarded = false;
  {
    Lock lock(streams().lock);
    const auto has_page = [&](const Guard& one) { return one.first_page <= address && address < one.last_page; };
    for (const Guard& one : guards()) {
      if (!has_page(one)) continue;
      is_guarded = true;
      if (in_work || address < one.begin || one.end <= address) continue;
      races.push_back({"the host", (one.may_read ? "writes " : "uses ") + one.tensor + " in pinned memory", {}, one.name, one.place, !one.may_read});
      remember(races.back());
    }
    lift(has_page);
  }
  for (Race& race : races) {
    race.later_place = find_place();
    tell(race);
  }
  if (is_guarded) return;
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(signal, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(signal);
  else
    sigaction(signal, &before, nullptr);  // and the instruction ends the process when it is tried again
}

// Another may have taken the signal meanwhile, as Python's faulthandler.
void take_signal() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == stopped) return;
  before = now;
  now = {};
  now.sa_sigaction = stopped;
  now.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &now, nullptr);
}

}  // namespace

void guard(const Access& bytes, const Work& work, const Operation& operation, const Place& place) {
  static std::once_flag first;
  std::call_once(first, [] {  // a child has the memory, and no stream that copies
    pthread_atfork([] { streams().lock.lock(); }, [] { streams().lock.unlock(); }, [] {
      lift([](const Guard&) { return true; });
      streams().lock.unlock();
    });
  });
  // A page that has other bytes of the storage stays open: the host may use these, in a system call, too.
  const uintptr_t first_page = bytes.begin / PAGE * PAGE, last_page = (bytes.end + PAGE - 1) / PAGE * PAGE;
  const bool opens = bytes.storage_begin < bytes.begin, closes = bytes.end < bytes.storage_end;
  Guard made{bytes.begin, bytes.end, first_page + (opens && first_page < bytes.begin ? PAGE : 0), last_page - (closes && bytes.end < last_page ? PAGE : 0),
             !bytes.writes, work, operation.name, operation.describe(bytes.tensor), place};
  if (made.first_page >= made.last_page) return;
  take_signal();
  guards().push_back(made);
  protect_all();
}

void lift_guards(const Clock& seen, const Lock&) {
  if (!guards().empty()) lift([&](const Guard& one) { return seen.has(one.work.stream, one.work.piece); });
}
