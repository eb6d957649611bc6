"""The translator: encoder, decoder, search."""
