"""Run six checks on text files, and read their first batch with a data module.

    python examples/test_local_data.py                # training_data/owt_train.txt, owt_valid.txt
    python examples/test_local_data.py a.txt b.txt    # other files

The checks are those of `penstock check`, which also shows the first documents of the files. The
exit code is 1 if one of them fails.
"""

import argparse
import sys
import time

from penstock.check import CheckSettings, check
from penstock.errors import PenstockError
from penstock.sources.settings import ReadSettings


def main() -> int:
    """Check the files, then read a batch; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train_file", nargs="?", default="training_data/owt_train.txt")
    parser.add_argument("val_file", nargs="?", default="training_data/owt_valid.txt")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args()

    reading = ReadSettings(documents="lines")  # one per line, as the data module below reads them
    trial = CheckSettings(reading=reading, length=options.max_length, batch_size=options.batch_size)
    report = check([options.train_file, options.val_file], trial)
    for finding in report.findings:
        mark = "✅" if finding.passed else "❌"
        verdict = "PASSED" if finding.passed else "FAILED"
        if finding.passed and finding.name == "Performance":
            verdict += " (>100K tokens/sec)"
        print(f"{mark} {finding.name} {verdict}: {finding.message}")
    if not report.passed:
        return 1
    return read_batch(options)


def read_batch(options: argparse.Namespace) -> int:
    """Read the first batch with the data module; returns the exit code.

    The speed is not measured again: the first batch includes the start of the tokenizer, and the
    check above has measured the loader alone.
    """
    try:
        from penstock.integrations.lightning import LocalOpenWebTextDataModule
    except ImportError as error:  # the checks need no Lightning
        print(error)
        return 0
    module = LocalOpenWebTextDataModule(
        options.train_file,
        options.val_file,
        max_length=options.max_length,
        batch_size=options.batch_size,
    )
    try:
        module.setup("fit")
        begun = time.perf_counter()
        batch = next(iter(module.train_dataloader()))
    except PenstockError as error:  # too little text for one batch, for example
        print(f"❌ {type(module).__name__} FAILED: {error}")
        return 1
    finally:
        module.teardown("fit")
    shape = tuple(batch["input_ids"].shape)
    took = time.perf_counter() - begun
    print(f"✅ {type(module).__name__} PASSED: the first batch {shape} came after {took:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
