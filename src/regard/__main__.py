"""`python -m regard`: the command line."""

import os
import sys

if sys.path[:1] in ([""], [os.getcwd()]):  # where Python, not the user, looks for modules first
    del sys.path[0]

from .cli.start import main

if __name__ == "__main__":
    main()
