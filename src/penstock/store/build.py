"""`build`: raw text to a sealed store.

Seconds, not hours, and safe to kill: run the same call again and it goes on. The bytes
of the store depend on inputs and settings alone.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.sources.document import Tally
from penstock.sources.settings import Format
from penstock.sources.texts import Texts
from penstock.store.existing import committed, earlier_build, killed_at_the_end, remember_stamps
from penstock.store.explain import count_rules
from penstock.store.files import remove_temporary, sync_directory, write_file
from penstock.store.holdout import SIDES, parse_split
from penstock.store.job import BuildProgress, Job, refuse_only_bad
from penstock.store.journal import Journal, SealedSlice
from penstock.store.lock import locked
from penstock.store.manifest import (
    FILE_NAME,
    builds,
    counts,
    manifest_bytes,
    read_manifest,
    rejects_file,
    shared_settings,
)
from penstock.store.prepare import Prepared, prepare
from penstock.store.reader import TokenStore
from penstock.store.workers import run
from penstock.tokenize.tokenizer import SpecialTokens

__all__ = ["begin", "build", "commit", "execute", "intact", "refuse_lost_bytes"]


def build(  # noqa: PLR0913  (the one call every user makes: flat keywords read best)
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Texts,
    store: str | os.PathLike[str],
    *,
    tokenizer: Any = "gpt2",
    format: Format = "auto",
    documents: str = "auto",
    field: str = "text",
    errors: Literal["strict", "replace"] = "strict",
    eos: bool | str = True,
    bos: bool | str = False,
    special_tokens: SpecialTokens = "text",
    add_tokens: Literal["auto"] | Sequence[str] | None = None,
    chat: Any = None,
    split: str | None = None,
    append: bool = False,
    max_bad: float = 0.001,
    max_document_bytes: int = 1 << 30,
    max_expansion: int = 200,
    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto",
    threads: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> TokenStore:
    """Tokenize `inputs` into a store in the directory `store`, and open it.

    A build that was killed goes on; one that is finished already returns at once. With
    `split` there are two stores, `store/train` and `store/val`, and the first is opened.

    Args:
        inputs: Paths, globs, directories or URLs, or `Texts` in memory. Files may be plain,
            .gz, .zst, .bz2 or .xz, and are taken in the order of their names.
        store: The directory to write.
        tokenizer: A name, a path or an object; see `load_tokenizer`.
        format: "text", "jsonl", "parquet", "arrow"; "auto" goes by the suffix.
        documents: In text files, "auto": the text between `<|endoftext|>`, or between the
            tokenizer's end token, if the first 64 MB of a file contain it (`</s>` never counts);
            otherwise the file is one document, of which every byte is kept. Or "lines",
            "paragraphs", "file", or "sep:SEPARATOR". A JSON line or a row of a table is a document.
        field: The JSON field or table column that holds the text; `a.b` is nested.
        errors: Documents that are not UTF-8: "strict" rejects them, "replace" mends them.
        eos: Whether a document ends with the tokenizer's end token, or which token it is.
        bos: Whether it begins with one; it is never put twice.
        special_tokens: "text" takes `<|endoftext|>` in a document as text, "parse" as a token.
        add_tokens: Special tokens to add to the tokenizer; their ids follow its vocabulary and are
            recorded in the store. "auto" adds the markers of the chat template that it lacks.
        chat: A chat template, or a `Chat`: the inputs are conversations (JSON Lines, JSON arrays,
            Parquet), and each token is stored with whether it is trained on. The tokens at the
            ends are the template's; `eos` is put, and trained on, only where it writes none.
        split: "tail:0.1" holds out the documents that begin in the last tenth, and the last
            tenth of the characters where the input is one document; "hash:0.1" holds out a tenth
            of the documents. A split that leaves a side empty is an error.
        append: Add `inputs` to a finished store as new parts; old parts are not touched.
        max_bad: How many rejects to bear: a share of all records below 1 (ten are always
            borne), else a number.
        max_document_bytes: Longer documents are rejected. A file that "auto" keeps whole is never
            too long if this is more than a slice (64 MB), since it is stored in pieces.
        max_expansion: Compressed files that grow more than this many times are refused.
        engine: Which program tokenizes; the ids are the same.
        threads: How many slices are tokenized at once, one a core where not given; changes speed
            and memory only.
        progress: Called about ten times a second, from the calling thread.

    Raises:
        SourceError: an input cannot be read as asked, or too many records are bad.
        TokenizerError: the tokenizer cannot be loaded, or its two engines disagree.
        StoreError: the directory holds something else.
        DiskFullError: there is no room; run again when there is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = build(Texts(["To be,", "or not to be."]), f"{folder}/store")
    ...     print(len(store), store.num_tokens, store.text(1))
    2 10 or not to be.
    """
    prepared = prepare(
        inputs,
        store,
        tokenizer=tokenizer,
        format=format,
        documents=documents,
        field=field,
        errors=errors,
        eos=eos,
        bos=bos,
        special_tokens=special_tokens,
        add_tokens=add_tokens,
        chat=chat,
        split=split,
        append=append,
        max_bad=max_bad,
        max_document_bytes=max_document_bytes,
        max_expansion=max_expansion,
        engine=engine,
        threads=threads,
    )
    with locked(prepared.directory):
        begun = begin(prepared)
        if begun is not None:
            execute(begun, prepared, progress)
    return TokenStore(prepared.directory / "train" if split else prepared.directory)


def begin(prepared: Prepared, *, live: bool = False) -> Job | None:
    """What is to be done under the lock, for `execute`; None where the store is finished already.

    Args:
        prepared: The build.
        live: Whether its parts are read while others are made; see `Job`.
    """
    directory, files, settings = prepared.directory, prepared.files, prepared.settings
    if killed_at_the_end(directory, prepared.stamped):
        return None
    earlier = earlier_build(directory, settings, files, prepared.append)
    if earlier is not None and not prepared.append:
        return None
    return Job(
        directory=directory,
        files=files,
        first_file=sum(len(done["inputs"]) for done in builds(earlier)),
        reading=prepared.reading,
        tokenizer=prepared.tokenizer,
        eos_id=settings["eos_id"],
        bos_id=settings["bos_id"],
        split=parse_split(prepared.split, files, prepared.reading),
        first_part=sum(done["slices"] for done in builds(earlier)),
        max_bad=prepared.max_bad,
        chat=prepared.chat,
        live=live,
    )


def execute(
    job: Job, prepared: Prepared, progress: Callable[[BuildProgress], None] | None = None
) -> None:
    """Run a build under its lock, from the journal to the manifest."""
    directories = [job.side_directory(side) for side in (SIDES if job.split else ("",))]
    journal = Journal(job.directory)
    begun = journal.begin(prepared.stamped)
    for each in {job.directory, *directories}:
        each.mkdir(exist_ok=True)
        remove_temporary(each)
    sealed = [record for record in begun if intact(job, record)]
    done = run(
        job,
        job.slices(),
        sealed,
        num_threads=prepared.threads,
        progress=progress,
    )
    refuse_lost_bytes(job, done)
    refuse_only_bad(job.files, done)
    _refuse_empty_side(job, done)
    if job.chat is not None:
        job.chat.report.log()
    remember_stamps(job.directory, job.files)
    for side in SIDES[::-1] if job.split else ("",):
        commit(job, side, prepared.settings, done, job.side_directory(side))
    journal.end()


def intact(job: Job, record: SealedSlice) -> bool:
    """Whether the files of a sealed slice are there, as long as they were."""
    for side, part in record.parts.items():
        for kind, (size, _) in part.files.items():
            path = job.side_directory(side) / f"part-{part.number:05d}.{kind}.npy"
            if not path.exists() or path.stat().st_size != size:
                return False
    return True


def refuse_lost_bytes(job: Job, done: list[SealedSlice]) -> None:
    """Raise if the bytes of plain text files do not all appear in the counts."""
    if any(file.compression or file.format not in ("text", "jsonl") for file in job.files):
        return
    counted = sum(record.tally.total_bytes for record in done)
    size = sum(file.size for file in job.files)
    if counted != size:
        raise StoreError(f"{size:,} bytes were to be read, and {counted:,} were accounted for.")


def _refuse_empty_side(job: Job, done: list[SealedSlice]) -> None:
    """Raise if the split leaves nothing to train on or nothing held out."""
    for side in SIDES if job.split else ():
        directory = job.side_directory(side)
        num_documents = sum(record.parts[side].num_documents for record in done)
        if not num_documents and not (directory / FILE_NAME).exists():
            others = sum(part.num_documents for record in done for part in record.parts.values())
            raise StoreError(
                f"The split leaves {directory} empty: the inputs have {others:,} documents, and "
                "none begins on that side. Hold out another share, use more documents, or build "
                f"the two sides from separate files. Delete {job.directory} before you build with "
                "another split."
            )


def commit(
    job: Job, side: str, settings: dict[str, Any], done: list[SealedSlice], directory: Path
) -> None:
    """Write the reject log and then the manifest of one side into its directory."""
    if settings["append"] and committed(directory, settings):
        return  # by a build that was killed before it came to the other side
    earlier = read_manifest(directory) if settings["append"] else None
    parts = list(earlier.parts) if earlier else []
    parts += [record.parts[side] for record in done if record.parts[side].num_documents]
    counted = counts(parts)
    log, reasons = _reject_log(job, done)
    size, digest = write_file(directory / rejects_file(len(builds(earlier))), [log])
    contents = {
        "format": "penstock-store",
        "version": 2 if "pieces" in counted else 1,
        "dtype": job.tokenizer.dtype.name,
        **shared_settings(settings),
        "side": side or None,
        "counts": counted,
        "builds": [
            *builds(earlier),
            {
                "slices": len(done),
                "counts": _tally(done),
                "rejects": {"bytes": size, "sha256": digest, "reasons": reasons},
                "reading": settings["reading"],
                **count_rules(done),
                "inputs": settings["inputs"],
            },
        ],
    }
    sync_directory(directory)
    write_file(directory / FILE_NAME, [manifest_bytes(contents, parts)])
    sync_directory(directory)


def _tally(done: list[SealedSlice]) -> dict[str, int]:
    """The counts of all slices; `pieces` only where there are more than documents."""
    tally = asdict(Tally.total(record.tally for record in done))
    continued = tally.pop("continued")
    return tally | ({"pieces": tally["documents"] + continued} if continued else {})


def _reject_log(job: Job, done: list[SealedSlice]) -> tuple[bytes, dict[str, int]]:
    """All rejects in order, a line each, and how many there are of each reason."""
    lines = []
    reasons: dict[str, int] = {}
    for record in done:
        for reject in record.rejects:
            lines.append(canonical_json({**asdict(reject), "file": job.files[reject.file].name}))
            reasons[reject.reason] = reasons.get(reject.reason, 0) + 1
    return b"".join(line + b"\n" for line in lines), dict(sorted(reasons.items()))
