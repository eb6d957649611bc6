"""Ports for the attention of timm, one file per model family."""
