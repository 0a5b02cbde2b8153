"""Writing of manifests and reject logs, which turns the files of a directory into a store."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from penstock.disk import write_file
from penstock.sources.batch import Tally
from penstock.store.inputs import input_digests, reject_lines
from penstock.store.job import Job
from penstock.store.journal import SealedSlice
from penstock.store.manifest import (
    INPUT_DIGEST,
    VERSION,
    JsonObject,
    PartTable,
    counts,
    read_manifest,
    rejects_file,
    remove_old_tables,
    shared_settings,
    write_manifest,
)
from penstock.store.sides import generation_of


def manifest_contents(
    settings: JsonObject,
    *,
    dtype: str,
    side: str,
    split: JsonObject,
    parts: PartTable,
    builds: Sequence[JsonObject],
) -> JsonObject:
    """The contents of a manifest, without its parts.

    Args:
        settings: Its tokenizer, end and start tokens, split and chat template are used.
        dtype: The type of the tokens.
        side: The side of the split; "" without one.
        split: The generation of the two sides; empty without a split.
        parts: All parts.
        builds: The first build of the store and all appends.
    """
    return {
        "format": "penstock-store",
        "version": VERSION,
        "dtype": dtype,
        **shared_settings(settings),
        "side": side or None,
        **split,
        "counts": counts(parts),
        "builds": [*builds],
    }


def commit(job: Job, done: list[SealedSlice]) -> None:
    """Write the reject logs and the manifests of all sides."""
    parts: dict[str, PartTable] = {}
    builds: dict[str, list[JsonObject]] = {}
    item_size = job.tokenizer.dtype.itemsize
    for side in job.sides:
        # A slice has no part here if its documents are all on the other side, or were rejected.
        new = [record.parts[side] for record in done if record.parts[side].num_documents]
        builds[side], parts[side] = [], PartTable.of(new, item_size)
        if job.append:
            earlier = read_manifest(job.directory / side)
            is_done = len(earlier.builds) > job.first_build
            parts[side] = earlier.parts.followed_by([] if is_done else new)
            builds[side] = earlier.builds
    split = {"generation": generation_of(parts)} if job.options.split else {}
    # The training side is committed last: `earlier_build` takes its manifest as the sign that
    # both sides are there.
    for side in reversed(job.sides):
        # A build that was killed between the sides has committed the first one already.
        if len(builds[side]) == job.first_build:
            _commit_side(job, side, done, parts[side], builds[side], split)
        else:
            remove_old_tables(job.directory / side)


def _commit_side(
    job: Job,
    side: str,
    done: list[SealedSlice],
    parts: PartTable,
    builds: list[JsonObject],
    split: JsonObject,
) -> None:
    """Write the reject log and then the manifest of one side."""
    settings, directory = job.recorded, job.directory / side
    tally = asdict(Tally.total(record.tally for record in done))
    continued = tally.pop("continued")
    rejects = [reject for record in done for reject in record.rejects]
    inputs = [dict(each) for each in settings["inputs"]]
    log = reject_lines(rejects, inputs)
    for file, digest in input_digests(each for record in done for each in record.pieces).items():
        inputs[file][INPUT_DIGEST] = digest
    reasons = dict(sorted(Counter(each.reason for each in rejects).items()))
    # How many files follow each rule that "auto" found; none with any other setting.
    rules = sum((Counter(record.rules) for record in done), Counter())
    size, digest = write_file(directory / rejects_file(len(builds)), log)
    done_now = {
        "slices": len(done),
        "counts": tally | ({"pieces": tally["documents"] + continued} if continued else {}),
        "rejects": {"bytes": size, "xxh3_128": digest, "reasons": reasons},
        "reading": settings["reading"],
        **({"documents": dict(sorted(rules.items()))} if rules else {}),
        **({"skipped_files": job.skipped} if job.skipped else {}),
        "inputs": inputs,
    }
    contents = manifest_contents(
        settings,
        dtype=job.tokenizer.dtype.name,
        side=side,
        split=split,
        parts=parts,
        builds=[*builds, done_now],
    )
    write_manifest(directory, contents, parts)
