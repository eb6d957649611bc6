"""Replacing the attention of a model by any mechanism, with the model's weights and names kept, and undoing it."""
