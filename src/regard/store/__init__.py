"""Results on disk: files that are whole or absent, the folder of runs, checks of imported runs. Needs no torch."""
