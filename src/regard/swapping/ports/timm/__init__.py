"""Ports for the attention of timm, one file a family."""
