"""What a build records about its inputs: names, contents and modification times.

    stores/owt/penstock.json       names below the common root of the inputs, and digests
    stores/.owt.stamps.json        modification times, by absolute path

The first is part of the store, and is the same on every machine. The second holds for one machine
only, so it is beside the store. It makes a rerun fast: if no time has changed, nothing is read. If
a time has changed, or the file is lost, the digests are compared.

The digest of an input is the XXH3-128 of the file. If its text was read in several pieces (a file
longer than a slice, or compressed), it is the XXH3-128 of the digests of their text, as hexadecimal
digits, one after the other. It tells whether a file changed by accident. Nobody gains by a file
that was made to have the digest of another one: who can replace an input can write any text into
it. SHA-256 would take a tenth of the time of a build.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import xxhash

from penstock.digest import canonical_json, checked_json, parse_checked
from penstock.disk import read_file, write_file
from penstock.errors import SourceError
from penstock.sources.batch import Reject
from penstock.sources.files import InputFile, open_file, refuse_changed
from penstock.sources.read import SpanDigests
from penstock.sources.slices import InputSpan, Slice
from penstock.store.manifest import JsonObject

Pieces = list[tuple[int, str]]
"""The number of an input and the digest of a piece of it, for each piece in order."""

_BLOCK_BYTES = 1 << 20


def piece_digests(
    files: Sequence[InputFile],
    spans: Iterable[InputSpan],
    known: SpanDigests | None = None,
) -> Pieces:
    """The digests of the pieces of inputs that `spans` cover; `known` ones are not computed again.

    Inputs that cannot be read again without cost have none: remote files and texts in memory. A
    remote file has an ETag, and the name of texts is a digest.

    Raises:
        SourceError: a file changed after it was listed.
    """
    found: Pieces = []
    for span in spans:
        file = files[span.file]
        digest = known.digest(span) if known else None
        if (digest := digest or _piece_digest(file, span)) is not None:
            # The text was read before, and must be the text that was digested now.
            refuse_changed(file)
            found.append((span.file, digest))
    return found


def _piece_digest(file: InputFile, span: InputSpan) -> str | None:
    digest = xxhash.xxh3_128()
    if span.data is not None:
        digest.update(span.data)
        return digest.hexdigest()
    if file.remote or not file.path or not Path(file.path).is_file():
        return None
    start, stop = span.start, span.stop
    if file.compression or file.format not in ("text", "jsonl"):
        # The spans of other formats are rows. The first span stands for the whole file.
        if start:
            return None
        stop = file.size
    with open_file(file) as stream:
        stream.seek(start)
        while start < stop and (block := stream.read(min(_BLOCK_BYTES, stop - start))):
            digest.update(block)
            start += len(block)
    if start < stop:
        raise SourceError(
            f"{file.name} ended at byte {start:,}, not at {stop:,} as when the build began. Run "
            "the build again when nothing writes to the file."
        )
    return digest.hexdigest()


def input_digests(pieces: Iterable[tuple[int, str]]) -> dict[int, str]:
    """The digest of each input, by its number."""
    found: dict[int, list[str]] = {}
    for file, digest in pieces:
        found.setdefault(file, []).append(digest)
    return {file: _joined(digests) for file, digests in found.items()}


def _joined(digests: list[str]) -> str:
    """The digest of an input from those of its pieces."""
    if len(digests) == 1:
        return digests[0]
    return str(xxhash.xxh3_128("".join(digests).encode()).hexdigest())


def read_digests(
    files: Sequence[InputFile], slices: Iterable[Slice], wanted: Collection[int]
) -> dict[int, str]:
    """The digests that the inputs with the numbers `wanted` have now."""
    if not wanted:
        return {}
    spans = (span for piece in slices for span in piece.spans if span.file in wanted)
    return input_digests(piece_digests(files, spans))


def reject_lines(rejects: Iterable[Reject], inputs: Sequence[JsonObject]) -> list[bytes]:
    """The lines of a reject log; `inputs` are those of the manifest."""
    return [
        canonical_json({**asdict(reject), "file": inputs[reject.file]["name"]}) + b"\n"
        for reject in rejects
    ]


def stamps_path(directory: Path) -> Path:
    """The file beside a store that holds the modification times of its inputs."""
    resolved = directory.resolve()
    return resolved.with_name(f".{resolved.name}.stamps.json")


def read_stamps(directory: Path, store: str) -> dict[str, str]:
    """The times of the inputs of the store with the digest `store`, by absolute path.

    Empty if the store was copied here, or replaced by another one, or if the file is damaged.
    """
    with suppress(OSError, ValueError):
        kept = parse_checked(read_file(stamps_path(directory)))
        if kept.get("store") == store:
            return dict(kept["stamps"])
    return {}


def remember_stamps(
    directory: Path, store: str, files: Sequence[InputFile], earlier: dict[str, str]
) -> None:
    """Write the modification times of `files`, and `earlier`, those of earlier builds."""
    stamps = earlier | {_key(file): file.stamp for file in files if file.path}
    if not stamps:  # texts in memory
        return
    with suppress(OSError):  # without them, the next build compares contents
        write_file(stamps_path(directory), [checked_json({"store": store, "stamps": stamps})])


def known_stamp(stamps: dict[str, str], file: InputFile) -> str | None:
    """The recorded time of `file`; None if there is none."""
    return stamps.get(_key(file), stamps.get(file.name))


def _key(file: InputFile) -> str:
    # The path of a remote file may contain a password; its name does not.
    return file.name if file.remote else str(Path(file.path).absolute())
