"""Code that several mechanisms use: the layer around an operator, input checks, landmarks, tiles, kernel features."""
