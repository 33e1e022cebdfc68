"""Checks at the start of a job: equal settings, reachable peers, writable storage."""
