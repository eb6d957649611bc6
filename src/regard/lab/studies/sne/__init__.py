"""Tables and figures of *Rethinking Query, Key and Value Embedding in Vision Transformer* (SNE)."""
