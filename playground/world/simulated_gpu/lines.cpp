// Asks the Python that runs here, if one does: nothing of it is needed to compile this.
#include "lines.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace {

// Folders of modules that carry out what a program calls: installed ones, and those of ours that run it, as in
// base/frames.py.
const char* const CARRIERS[]{"/site-packages/",     "/dist-packages/",     "/lib/python3.",       "/playground/base/",
                             "/playground/tap/",    "/playground/world/",  "/playground/explain/", "/playground/testing/",
                             "/playground/play/"};

template <class Function>
Function find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

struct Python {
  int (*Py_IsInitialized)() = find<int (*)()>("Py_IsInitialized");
  int (*Py_IsFinalizing)() = find<int (*)()>("Py_IsFinalizing");
  int (*_Py_IsFinalizing)() = find<int (*)()>("_Py_IsFinalizing");
  int (*PyGILState_Check)() = find<int (*)()>("PyGILState_Check");
  int (*PyGILState_Ensure)() = find<int (*)()>("PyGILState_Ensure");
  void (*PyGILState_Release)(int) = find<void (*)(int)>("PyGILState_Release");
  void* (*PyGILState_GetThisThreadState)() = find<void* (*)()>("PyGILState_GetThisThreadState");
  void* (*PyThreadState_GetFrame)(void*) = find<void* (*)(void*)>("PyThreadState_GetFrame");
  void* (*PyFrame_GetBack)(void*) = find<void* (*)(void*)>("PyFrame_GetBack");
  void* (*PyFrame_GetCode)(void*) = find<void* (*)(void*)>("PyFrame_GetCode");
  int (*PyFrame_GetLasti)(void*) = find<int (*)(void*)>("PyFrame_GetLasti");
  int (*PyCode_Addr2Line)(void*, int) = find<int (*)(void*, int)>("PyCode_Addr2Line");
  void* (*PyObject_GetAttrString)(void*, const char*) = find<void* (*)(void*, const char*)>("PyObject_GetAttrString");
  const char* (*PyUnicode_AsUTF8)(void*) = find<const char* (*)(void*)>("PyUnicode_AsUTF8");
  void (*Py_DecRef)(void*) = find<void (*)(void*)>("Py_DecRef");
  bool runs() const {
    auto* ends = Py_IsFinalizing ? Py_IsFinalizing : _Py_IsFinalizing;
    return Py_IsInitialized && Py_IsInitialized() && !(ends && ends());
  }
};

const Python& python() {
  static const Python* one = new Python;
  return *one;
}

struct WithGIL {
  const bool has_it = python().PyGILState_Check();
  const int before = has_it ? 0 : python().PyGILState_Ensure();
  ~WithGIL() {
    if (!has_it) python().PyGILState_Release(before);
  }
};

std::string file_of(void* code) {
  void* name = python().PyObject_GetAttrString(code, "co_filename");
  const char* text = name ? python().PyUnicode_AsUTF8(name) : nullptr;
  std::string file = text ? text : "?";
  if (name) python().Py_DecRef(name);
  return file;
}

// Whether code is the program's. What was asked once is kept for good, so that a place stays valid.
bool is_program(void* code) {
  static auto* known = new std::unordered_map<void*, bool>;
  auto [found, is_new] = known->emplace(code, false);
  if (is_new) {
    std::string file = file_of(code);
    bool carries = file[0] == '<';
    for (const char* folder : CARRIERS) carries |= file.find(folder) != std::string::npos;
    found->second = !carries;
    return !carries;  // and the reference is kept
  }
  python().Py_DecRef(code);
  return found->second;
}

// The innermost line of the program in a thread; where there is none, the outermost of any.
struct Found {
  Place place;
  bool is_program = false;
};

Found innermost(void* thread) {
  const Python& api = python();
  Found found;
  for (void* frame = api.PyThreadState_GetFrame(thread); frame && !found.is_program;) {
    void* code = api.PyFrame_GetCode(frame);
    found = {{code, api.PyFrame_GetLasti(frame)}, is_program(code)};
    void* back = found.is_program ? nullptr : api.PyFrame_GetBack(frame);
    api.Py_DecRef(frame);
    frame = back;
  }
  return found;
}

}  // namespace

Place find_place() {
  static void* main_thread = nullptr;
  if (!python().runs()) return {};
  WithGIL lock;
  void* thread = python().PyGILState_GetThisThreadState();
  if (gettid() == getpid()) main_thread = thread;
  Found found = innermost(thread), there = found.is_program || !main_thread ? Found{} : innermost(main_thread);
  return there.is_program || !found.place.code ? there.place : found.place;
}

std::string text_of(const Place& place) {
  if (!place.code || !python().runs()) return "an unknown line";
  WithGIL lock;
  std::string file = file_of(place.code);
  char here[PATH_MAX];
  if (getcwd(here, sizeof here) && file.rfind(std::string(here) + "/", 0) == 0) file = file.substr(std::string(here).size() + 1);
  return file + ":" + std::to_string(python().PyCode_Addr2Line(place.code, place.instruction));
}

bool is_known_to_python() {
  return !python().PyGILState_GetThisThreadState || python().PyGILState_GetThisThreadState();
}

std::string wrapped(const std::string& text) {
  std::istringstream words(text);
  std::string all, line, word;
  while (words >> word) {
    if (!line.empty() && line.size() + 1 + word.size() > 80) all += std::exchange(line, "") + "\n";
    line += (line.empty() ? "" : " ") + word;
  }
  return all + line + "\n";
}
