"""Comparison of this checkpointer with Orbax's managers, plain Orbax and the machine's limits."""
