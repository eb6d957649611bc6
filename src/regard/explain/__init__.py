"""What a trained model looks at: attention maps, the four factors apart, sampling points, codes; also as pictures."""
