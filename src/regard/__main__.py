"""`python -m regard`: the command line."""

from .cli.start import main

if __name__ == "__main__":
    main()
