"""The steps of a persistent directory: their list, their state, their removal."""
