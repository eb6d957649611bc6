"""Explaining trained models: attention maps, the four factors of attention, sampling points, codes, and pictures."""
