"""`python -m penstock.train RECIPE`: the trainer, for machines with only NumPy and torch.

With torchrun: `torchrun --nproc-per-node 8 -m penstock.train RECIPE`. The flags are those of
`penstock train`, except --json. The command `penstock train` also needs typer and rich.
"""

import argparse
import sys
from contextlib import closing

from penstock.cli.terminal import message_of
from penstock.errors import PenstockError
from penstock.train.command import choose_recipe, recipe_changes, run_recipe
from penstock.train.display import Display, summary_line
from penstock.train.distributed import torchrun_rank
from penstock.train.metrics import Log


def main() -> int:
    """Parse the command line and train; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m penstock.train", description="Train a GPT-2.")
    parser.add_argument("source", nargs="?", help="a recipe (.toml), a text file or a store")
    parser.add_argument("--output", "-o")
    parser.add_argument("--device")
    for name in ("train_file", "val_file"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name in ("batch_size", "max_length", "num_workers", "prefetch_factor"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--max_minutes", "--max-minutes", type=float)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    # The same flags as `penstock train` has through typer, which is not imported here.
    flags = vars(parser.parse_args())
    source, device, settings = flags.pop("source"), flags.pop("device"), flags.pop("set")
    try:
        with closing(Display()) as display:
            # Under torchrun only the first process prints.
            log: Log = display if not torchrun_rank() else (lambda _: None)
            recipe = choose_recipe(source, recipe_changes(settings, **flags), device, log)
            result = run_recipe(recipe, device=device, log=log)
            log(summary_line(result.progress, finished=result.finished))
    except (PenstockError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {message_of(error)}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: stopped by Ctrl-C.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
