"""Keys from the run secret, and values and steps that prove that their writer had it."""
