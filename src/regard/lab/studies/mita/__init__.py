"""Tables and figures of *Mixture-of-Top-k Attention* (MiTA)."""
