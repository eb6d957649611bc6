"""Titles of the four papers, as the sources of studies, errata and reports name them."""

SKA_PAPER = "Static Key Attention in Vision"
SNE_PAPER = "Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints"
MITA_PAPER = "Mixture-of-Top-k Attention"
MITA_SOURCE = "MiTA, arXiv 2602.01219"
"""The source of that paper's studies, whose titles use the short name."""
ESA_PAPER = "An Empirical Study of Spatial Attention Mechanisms in Deep Networks"
