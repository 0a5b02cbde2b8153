"""`python -m penstock`: the command line, if the console script is not on the PATH."""

from penstock.cli import main

if __name__ == "__main__":
    main()
