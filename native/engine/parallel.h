// A loop over independent tasks on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace eckpt {

inline constexpr int kMaxThreads = 256;

// Runs task(i) once for each i in [0, count) on at most `threads` threads, the calling one
// included, and returns when all have ended. Each thread takes the next task when it is free, so a
// slow thread delays no other. When a task throws, no further task starts and the first exception
// is thrown again here. When the system gives no more threads, the existing ones do the work.
// `threads` must be in [1, kMaxThreads], else std::invalid_argument.
void ParallelFor(size_t count, int threads, const std::function<void(size_t)>& task);

}  // namespace eckpt
