// Operators that CUDA has and the CPU has not, by operators that both have.
#pragma once
#include <map>
#include <string>

namespace torch {
class Library;
}

// By the operator's name: what gives it a kernel.
const std::map<std::string, void (*)(torch::Library&)>& composed();
