"""Deformable attention."""
