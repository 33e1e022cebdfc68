"""The record of a job: each process's events on disk, one JSON object per line.

Files of a directory:

- ``events_<process:05d>.jsonl``: the events of one process of the job, of all its lives; the
  launcher's are in ``events_launcher.jsonl``. A restart appends.
- ``events_<process:05d>.<n>.jsonl``: older ones of the same process; the higher n, the older. The
  oldest file is removed for room.
- ``events_<process:05d>-<n>.jsonl``: those of another program with the same process id that wrote
  at the same time, such as a second job with the same directory.

Each line is an object, ``{"time_s": float, "name": str, "process": int | null, "slice": int | null,
"run_id": str, "incarnation": str, "fields": {...}, "life": int}``: Unix time; the event's
name and fields as in ``docs/monitoring.md``; the process and its slice, null for the launcher; the
run and the life of the job that emitted it (those of a restore carry the incarnation before it),
empty before they are known; the number of restarts by ``eckpt launch``, 0 without it.

Guarantees: a line is whole, or the last of its file (a killed process) or before a line that
follows it after a failed write; readers skip it. A normal stop loses nothing. A killed process
loses events that its writer thread had not yet passed to the kernel: those of the last
milliseconds, at most ``log_writer.MAX_WAITING``. Nothing here raises into training or keeps it
waiting: a full disk, a removed directory and a silent file server are logged once, events are
dropped meanwhile, and the event ``log.lost`` tells their number afterwards.

Not guaranteed: that a line survives a crash of the host, since nothing is synced.
"""

from emergency_ckpt.extras.event_log.log_writer import (
    EventLog,
    EventLogObserver,
    from_text,
    open_event_log,
)
from emergency_ckpt.extras.event_log.reader import EventHistory, LogTail, read_events
from emergency_ckpt.extras.event_log.records import LoggedEvent, decode_line, encode_line

__all__ = [
    "EventHistory",
    "EventLog",
    "EventLogObserver",
    "LogTail",
    "LoggedEvent",
    "decode_line",
    "encode_line",
    "from_text",
    "open_event_log",
    "read_events",
]
