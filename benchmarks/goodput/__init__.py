"""Goodput of large jobs, computed rather than measured."""
