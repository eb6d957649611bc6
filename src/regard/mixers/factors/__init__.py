"""The four factors of spatial attention (E1-E4). `factors.py` has the operator and the configuration."""
