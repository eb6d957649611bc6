"""What several mechanisms use: the layer around an operator, landmarks, tiles, kernels, precision."""
