"""The secret of a job: how a start agrees on it, and values sealed with a key of it."""
