"""The laboratory: runs, the store of results, studies and their statistics."""
