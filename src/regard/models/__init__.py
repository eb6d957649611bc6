"""Regard's own models, each with the port of its attention; the catalog of all models; saving and loading."""
