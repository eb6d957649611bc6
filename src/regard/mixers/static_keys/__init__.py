"""Static keys: learned keys instead of projected ones; the mechanisms are in `ska.py` and `cska.py`."""
