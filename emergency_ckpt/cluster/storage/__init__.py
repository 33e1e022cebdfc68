"""The persistent directory as the whole job sees it: its timeline, and the run that saves there."""
