// What the parts of the simulated GPU ask of its runtime.
#pragma once
#include <functional>

// Put work into a stream (0: the default stream of the thread's device), after all that was put there before. It runs in
// the stream's own thread and the caller goes on; work that waits for nothing may run at once where the stream is idle.
void enqueue(void* stream, std::function<void()> work, bool may_wait = false);

// Wait until nothing is left to do on a device, as the first launch of a kernel does under CUDA's lazy loading.
void wait_until_idle(int device);

// What torch.cuda._sleep does, in the stream that torch takes for the current one.
extern void (*sleep_in_stream)(long cycles);
