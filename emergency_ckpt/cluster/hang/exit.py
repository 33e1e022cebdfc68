"""The end of a process of a job that hangs: stacks, a line, an event, and status 124."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from absl import logging

from emergency_ckpt.events import EventSink

HANG_EXIT_CODE = 124
"""Exit status of every process of a job that hangs, as of timeout(1)."""
_STACKS_LIMIT_CHARS = 64 << 10
_REPORT_TIMEOUT_S = 10.0


def end_hung_process(
    events: EventSink, behind: str, reason: str, wait: Callable[[], object], wait_s: float
) -> None:
    """Report the hang and end this process. Never returns; nothing is flushed but the report.

    Args:
      wait: called after the report; may take ``wait_s``.
    """
    threading.Thread(target=_end_after, args=[_REPORT_TIMEOUT_S + wait_s], daemon=True).start()
    try:
        _report(events, behind, reason)
        wait()
    except BaseException:  # noqa: BLE001 - the process ends, whatever the report comes to
        logging.exception("the report of a hang is not complete")
    finally:
        os._exit(HANG_EXIT_CODE)


def _end_after(timeout_s: float) -> None:
    # A listener, a log or the service may hang just as the job does.
    time.sleep(timeout_s)
    os._exit(HANG_EXIT_CODE)


def _report(events: EventSink, behind: str, reason: str) -> None:
    text = f"the job hangs, so this process ends with status {HANG_EXIT_CODE}: {reason}"
    stacks = _stacks()
    os.write(2, f"{text}\n{stacks}\n".encode(errors="replace"))
    if logging.get_absl_handler().python_handler.stream not in (sys.stderr, sys.__stderr__):
        logging.error("%s\n%s", text, stacks)
    else:
        logging.error("%s", text)
    events.emit("hang.found", behind=behind, reason=reason, stacks=stacks)
    events.close()
    logging.flush()


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_STACKS_LIMIT_CHARS).decode(errors="replace")
