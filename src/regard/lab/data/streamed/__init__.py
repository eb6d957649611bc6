"""Training images that are read in order and never held: of the Hugging Face hub, and the user's own shards."""
