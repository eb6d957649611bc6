"""Tables and figures of *Static Key Attention in Vision* (SKA)."""
