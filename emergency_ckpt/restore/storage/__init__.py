"""A stored step in a restore: the steps to choose from, the plan of a load, one part of it."""
