"""Advice for a user's own model: which mechanisms fit into it, and what they cost."""
