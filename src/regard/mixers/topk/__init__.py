"""Exact top-k attention."""
