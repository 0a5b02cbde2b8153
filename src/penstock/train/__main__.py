"""`python -m penstock.train RECIPE`: the trainer where only NumPy and torch are installed.

Under torchrun it is `torchrun --nproc-per-node 8 -m penstock.train RECIPE`. The same flags as
`penstock train`, but for --json; that one needs typer and rich, too.
"""

import argparse
import sys

from penstock.errors import PenstockError
from penstock.train.command import changes_of, execute, recipe_of
from penstock.train.display import Display
from penstock.train.job import Tell
from penstock.train.world import launched_rank


def main() -> int:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(prog="python -m penstock.train", description="Train a GPT-2.")
    parser.add_argument("source", nargs="?", help="a recipe, a text file or a store")
    parser.add_argument("--output", "-o")
    parser.add_argument("--device")
    for name in ("train_file", "val_file"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name in ("batch_size", "max_length", "num_workers", "prefetch_factor"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--max_minutes", "--max-minutes", type=float)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    flags = vars(parser.parse_args())
    source, device, settings = flags.pop("source"), flags.pop("device"), flags.pop("set")
    display = Display()
    tell: Tell = display if launched_rank() in (None, 0) else (lambda _: None)
    try:
        recipe, told = recipe_of(source, changes_of(flags, settings), device)
        for line in told:
            tell(f"guessed {line}")
        outcome = execute(recipe, device=device, tell=tell)
    except (PenstockError, OSError) as error:
        notes = getattr(error, "__notes__", [])
        sys.stderr.write("\n".join([f"{type(error).__name__}: {error}", *notes, ""]))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: stopped by Ctrl-C.\n")
        return 130
    finally:
        display.close()
    if not outcome.finished:
        sys.stdout.write("stopped as asked; the same command goes on\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
