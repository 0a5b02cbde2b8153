"""Run six checks on text files, and measure how fast a data module loads them.

    python examples/test_local_data.py                # training_data/owt_train.txt, owt_valid.txt
    python examples/test_local_data.py a.txt b.txt    # other files

The checks are those of `penstock check`, which also shows the first documents of the files. The
exit code is 1 if a check fails.
"""

import argparse
import sys
import time

from penstock.check import CheckSettings, check
from penstock.sources.settings import ReadSettings


def main() -> int:
    """Check the files, then load a few batches; returns the exit code."""
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
    measure_batches(options)
    return 0


def measure_batches(options: argparse.Namespace) -> None:
    """Stream the training file through the data module for a second."""
    try:
        from penstock.integrations.lightning import LocalOpenWebTextDataModule
    except ImportError as error:
        print(error)
        return
    module = LocalOpenWebTextDataModule(
        options.train_file,
        options.val_file,
        max_length=options.max_length,
        batch_size=options.batch_size,
    )
    module.setup("fit")
    begun = time.perf_counter()
    num_tokens, shapes = 0, []
    for batch in module.train_dataloader():
        num_tokens += batch["input_ids"].numel()
        shapes.append(tuple(batch["input_ids"].shape))
        if time.perf_counter() - begun > 1:
            break
    took = time.perf_counter() - begun
    print(
        f"{len(shapes):,} batches of {shapes[0]} in {took:.1f} s: {num_tokens / took:,.0f} tokens/s"
    )
    module.teardown("fit")


if __name__ == "__main__":
    sys.exit(main())
