"""The four factors of spatial attention (E1-E4); the operator and the configuration are in `factors.py`."""
