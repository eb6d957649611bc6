"""Static keys: learned keys in the place of projected ones. `ska.py` and `cska.py` have the mechanisms."""
