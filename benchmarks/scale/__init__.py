"""Growth of the control side of a save and a restore up to 10,000 processes."""
