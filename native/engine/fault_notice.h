// A line on stderr when a mapped file lets the process down: SIGBUS says neither which nor why.
#pragma once

#include <cstddef>

namespace eckpt {

// Installs our handler of SIGBUS in front of the one that is there, unless it is in front already.
// Where the fault lies in watched memory it writes one line; then the handler before ours has its
// turn, or the process dies of the signal as it would have. Thread-safe.
void EnsureFaultNotice();

// Memory of which a fault is worth a line. At most 1024 ranges are watched at a time; of more the
// signal comes without one. Thread-safe.
void WatchForFaults(const void* begin, size_t nbytes);
void UnwatchForFaults(const void* begin);

}  // namespace eckpt
