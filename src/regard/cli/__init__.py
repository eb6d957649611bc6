"""The command line: one file a verb, collected in `app.py`. Torch is imported inside commands only."""
