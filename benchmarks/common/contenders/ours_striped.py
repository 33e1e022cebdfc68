"""This project's checkpointer where each slice writes its part of the one copy in storage.

As plain Orbax does by default; the default here is that one slice writes all.
"""

from benchmarks.common.contenders import Site, ours
from benchmarks.common.contenders.ours import OurSession, prepare

__all__ = ["open_session", "prepare"]


def open_session(site: Site) -> OurSession:
    return ours.open_session(site, persistent_writers="striped")
