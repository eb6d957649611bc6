"""Mixture of top-k attention (MiTA); the operator and the configuration are in `mita.py`."""
