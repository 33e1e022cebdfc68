"""Notice of a preemption: its signals, and the step at which all processes act on it."""
