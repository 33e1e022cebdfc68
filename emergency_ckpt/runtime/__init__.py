"""Threads, clocks and JAX's coordination service: where decisions of ``core`` are carried out."""
