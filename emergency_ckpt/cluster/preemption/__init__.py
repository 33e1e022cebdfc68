"""Preemption notices: their sources, and the step at which all processes act on one."""
