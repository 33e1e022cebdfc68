"""Computed, not measured: what large jobs keep of their time."""
