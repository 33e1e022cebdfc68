"""The modules of axlearn that a checkpointer meets."""
