"""Training: the recipe, the optimizer, the loop, checkpoints, and a run as data with a key."""
