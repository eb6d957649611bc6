"""`python -m regard`: the command line."""

from regard.cli.start import main

if __name__ == "__main__":
    main()
