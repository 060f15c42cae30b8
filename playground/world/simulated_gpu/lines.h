// Where in the program of Python a thread is.
#pragma once
#include <string>

// An instruction of the program. It costs little to remember; its file and line are looked up when they are told.
struct Place {
  void* code = nullptr;
  int instruction = 0;
  bool operator==(const Place&) const = default;
};

// The innermost line of the program in this thread; in a thread that has none, as of autograd's for a GPU, that in the main
// thread. Takes Python's lock.
Place find_place();

// "train.py:12". Takes Python's lock.
std::string text_of(const Place& place);

// A message in lines of 80 columns.
std::string wrapped(const std::string& text);

// Whether the calling thread has run Python.
bool is_known_to_python();
