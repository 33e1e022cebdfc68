"""Checks at the start of a job: equal settings, peers within reach, storage that takes writes."""
