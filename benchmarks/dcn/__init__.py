"""A restore over slow links between 2, 4 and 8 slices."""
