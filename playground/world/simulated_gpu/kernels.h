// What the kernels have in common.
#pragma once
#include <cstdint>

// What a kernel without a generator of its own draws from, such as the dropout of attention: set for each launch, from
// the state of the device's generator.
extern thread_local uint64_t seed_of_launch;
