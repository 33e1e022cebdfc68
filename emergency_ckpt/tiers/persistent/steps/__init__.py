"""The steps of a persistent directory: which there are, what each is worth, and their removal."""
