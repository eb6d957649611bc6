"""The folder of runs: results, metrics, layout, housekeeping, checks of what is imported."""
