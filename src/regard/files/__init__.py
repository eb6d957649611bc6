"""Files whole or absent, sealed records, tensor files, paths."""
