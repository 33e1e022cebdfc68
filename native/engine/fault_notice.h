// A line on stderr at a SIGBUS in a mapped file, because the signal names neither file nor cause.
#pragma once

#include <cstddef>

namespace eckpt {

// Installs our handler of SIGBUS before the existing one, unless it is already first. It writes one
// line when the fault is in watched memory; then the previous handler runs, or the process dies of
// the signal as it would without ours. Thread-safe.
void EnsureFaultNotice();

// Memory whose faults get a line. At most 1024 ranges are watched at a time; a fault in any further
// one has no line. Thread-safe.
void WatchForFaults(const void* begin, size_t nbytes);
void UnwatchForFaults(const void* begin);

}  // namespace eckpt
