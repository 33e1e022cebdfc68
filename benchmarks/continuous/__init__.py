"""Benefit and cost of continuous saving."""
