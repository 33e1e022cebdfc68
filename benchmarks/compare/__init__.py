"""This checkpointer beside Orbax's managers and plain Orbax, and the machine's limits."""
