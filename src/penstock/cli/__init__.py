"""The command line: the same objects, typed in a shell.

Takes arguments, gives tables for people and one JSON object for programs. Commands only
parse and print; whatever they compute stands in the library. Heavy packages are imported
inside commands, so `penstock --help` answers at once.
"""

import sys


def main() -> None:
    """Run the command line of this process; the console script `penstock`."""
    try:
        from penstock.cli.app import run
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: stopped by Ctrl-C.\n")
        sys.exit(130)
    run()
