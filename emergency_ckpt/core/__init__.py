"""Decisions as pure functions: no IO, no clock, no threads, no JAX."""
