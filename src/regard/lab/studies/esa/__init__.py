"""Tables and figures of *An Empirical Study of Spatial Attention Mechanisms in Deep Networks* (ESA)."""
