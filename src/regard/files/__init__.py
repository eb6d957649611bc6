"""Results on disk: atomic files, the folder of runs with locks, checks of imported files. Needs no torch."""
