"""Mixture of top-k attention (MiTA). `mita.py` has the operator and the configuration."""
