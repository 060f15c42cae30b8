// Pinned memory of the host while a stream still has to copy from it or to it.
#pragma once
#include "races.h"

// From now on the host may not touch these bytes, or not change them, before it has waited for the work that writes or reads
// them. The caller holds the lock of the streams.
void guard(const Access& bytes, const Work& work, const Operation& operation, const Place& place);

// What the host has waited for it may use again.
void lift_guards(const Clock& seen, const Lock&);
