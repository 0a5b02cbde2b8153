"""The settings of one build, as the user gave them and after the inputs were listed.

    BuildOptions    the options of `build` or `stream`, as the user gave them
    Job             the same after the inputs were listed and the tokenizer was loaded

Everything that the bytes of a store depend on is in `Job.recorded`. Two builds with equal
`recorded` write the same store. A build that was killed is resumed only by a build that has the
same `recorded` and whose inputs have the same modification times.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.disk import make_tree
from penstock.errors import MissingStoreError, SourceError, TokenizerError
from penstock.options import BuildOptions, num_cores, parse_workers
from penstock.paths import expand_user
from penstock.sources.batch import Batch, Reject
from penstock.sources.files import InputFile
from penstock.sources.listing import list_inputs, log_surprises
from penstock.sources.read import SpanDigests, read_slice
from penstock.sources.settings import Texts
from penstock.sources.slices import Slice, cut
from penstock.store.cuts import cut_safety
from penstock.store.manifest import JsonObject
from penstock.store.part import SIDES, Split, parse_split
from penstock.store.verify import recorded_names
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from penstock.store.chats import ChatStage
    from penstock.store.remake import StoreFile
    from penstock.store.upload import Destination

Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Texts
WorkersName = Literal["auto", "threads", "processes", "ray"]
Report = Callable[["BuildProgress"], None]
"""A function that is called with the progress of a build."""

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """The state of a running build, as a progress callback receives it."""

    done_bytes: int
    total_bytes: int
    """Bytes on disk; of compressed inputs, fewer than the text they hold."""
    text_bytes: int
    num_documents: int
    num_tokens: int
    num_rejects: int


@dataclass(frozen=True, slots=True)
class Job:
    """A build whose inputs are listed and whose tokenizer is loaded."""

    options: BuildOptions
    """As the user gave them, with the separators of the tokenizer."""
    directory: Path
    files: list[InputFile]
    tokenizer: Tokenizer
    recorded: JsonObject
    """Everything that the bytes of the store depend on, as JSON."""
    chat: "ChatStage | None" = None
    """Renders documents that are conversations."""
    skipped: dict[str, int] = field(default_factory=dict)
    """How many paths the listing left out, by kind. Not in `recorded`: a hidden file that appears
    later does not make another build of the same inputs."""
    split: Split | None = None
    append: bool = False
    """Whether the inputs are added to a finished store."""
    first_build: int = 0
    """Number of earlier builds of the same store."""
    first_file: int = 0
    """Number of input files of earlier builds of the same store."""
    first_part: int = 0
    """Number of slices of earlier builds of the same store."""
    wanted: frozenset[int] | None = None
    """The numbers of the slices to make; None if all are wanted."""
    damaged: "Sequence[StoreFile]" = ()
    """The files of a finished store to make again; empty if this build makes a store."""
    live: bool = False
    """Whether parts are read while others are built. Then one thread makes them as long as no
    reader waits, and the first documents are compared when their part can be read."""
    remote: "Destination | None" = None
    """Where sealed parts are sent; `directory` is then a staging directory on this machine."""

    @property
    def num_threads(self) -> int:
        """How many slices are tokenized at once; by default one per core of this process."""
        return parse_workers(self.options.workers)[1] or num_cores()

    @property
    def stamped(self) -> JsonObject:
        """`recorded`, and the modification time of each input."""
        return {**self.recorded, "stamps": [file.stamp for file in self.files]}

    def slices(self) -> Iterator[Slice]:
        """The inputs, cut into slices, as far as they are wanted; each becomes one part."""
        # Cuts are tested with the reference, so that slices do not depend on the engine.
        is_cut_safe = cut_safety(self.tokenizer.reference or self.tokenizer.engine)
        border = self.split.cut_at if self.split else None
        slices = cut(self.files, self.options, is_cut_safe=is_cut_safe, border=border)
        if self.wanted is None:
            return slices
        last = max(self.wanted, default=-1)
        return (piece for piece in islice(slices, last + 1) if piece.index in self.wanted)

    def batches(self, piece: Slice, digests: SpanDigests | None = None) -> Iterator[Batch]:
        """The documents of a slice, with the file numbers of the store; see `read_slice`."""
        # A split by digest needs the whole text of a document at once, and so does a template.
        is_hashed = self.split is not None and self.split.kind == "hash"
        is_whole = is_hashed or self.chat is not None
        tokenizer = self.tokenizer
        is_cut_safe = None if is_whole else cut_safety(tokenizer.engine, tokenizer.reference)
        for batch in read_slice(self.files, piece, self.options, is_cut_safe, digests):
            batch.files += self.first_file
            yield batch

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides of the split, which are folders of `directory`; "" without a split."""
        return SIDES if self.options.split else ("",)

    def located(self, reject: Reject) -> str:
        """A rejected record with its file and offset, for messages."""
        name = self.files[reject.file].name
        return f"{name}, offset {reject.offset:,}: {reject.reason}, {reject.detail}"


def prepare(
    inputs: Inputs, store: str | os.PathLike[str], options: BuildOptions, *, append: bool = False
) -> Job:
    """List the inputs, load the tokenizer and create the directory; nothing else is written."""
    parse_split(options.split, (), options)  # a wrong one is refused before anything is read
    if options.chat is not None:
        options = replace(options, documents="lines")
    listing = list_inputs(inputs, options)
    files = listing.files
    _refuse_token_files(files)
    tokenizer, eos, bos = options.tokenizer, options.eos, options.bos
    stage = None
    if options.chat is not None:
        from penstock.store.chats import chat_file, chat_stage

        stage = chat_stage(options)
        # The template's markers were added to the tokenizer, and the template decides whether an
        # end token is added.
        tokenizer = stage.chat.tokenizer
        eos, files = stage.eos, [chat_file(file) for file in files]
    loaded = load_tokenizer(tokenizer)
    _log_omitted_start(loaded, bos, stage)
    reading = replace(options, separators=separators_of(loaded))
    log_surprises(listing.files, reading)  # as the user gave them, not as lines of a chat
    recorded: JsonObject = {
        # Settings that change no byte are left out: threads, workers, and `max_bad`.
        "tokenizer": loaded.describe(),
        "eos_id": _edge_id(loaded, eos, "eos"),
        "bos_id": _edge_id(loaded, bos, "bos"),
        "split": options.split,
        "reading": reading.describe(),
        "inputs": recorded_inputs(files),
        "append": append,
        **({} if stage is None else {"chat": stage.chat.describe()}),
    }
    directory = expand_user(store)
    if append and not directory.exists():
        raise MissingStoreError(
            f"{directory} does not exist, so nothing can be appended to it. For the first build, "
            "leave out append=True (--append) of penstock.build."
        )
    make_tree(directory)
    return Job(reading, directory, files, loaded, recorded, stage, listing.skipped, append=append)


def _refuse_token_files(files: Sequence[InputFile]) -> None:
    """Raise SourceError if a file has token ids: small ids could be read as UTF-8."""
    for file in files:
        # By the suffix first, because no format is looked for in a million files of text.
        if file.remote or file.texts is not None or not file.path.endswith((".bin", ".ds")):
            continue
        from penstock.formats.open import recognised, set_of

        path = Path(file.name)
        kinds = [(format, path) for format in recognised(path)]
        found = kinds[0] if kinds else set_of(path)
        if found is not None:
            format, place = found
            raise SourceError(
                f"{file.name} holds token ids ({format}), and no text. Import them with "
                f"penstock.import_tokens, or: penstock import {place} -o STORE --tokenizer NAME."
            )


def recorded_inputs(files: Sequence[InputFile]) -> list[JsonObject]:
    """The inputs of a build as it records them before they are read."""
    names = recorded_names([each.name for each in files])
    return [file.describe() | {"name": name} for file, name in zip(files, names, strict=True)]


def separators_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The separators that "auto" looks for: `<|endoftext|>`, and the tokenizer's end token.

    `</s>` is never one of them, because it is also an HTML tag.
    """
    tokens = ["<|endoftext|>", tokenizer.eos_token]
    return tuple(dict.fromkeys(token for token in tokens if token and token != "</s>"))


def _log_omitted_start(tokenizer: Tokenizer, bos: bool | str, stage: "ChatStage | None") -> None:
    """Warn if the tokenizer itself would begin each text with a token that the store lacks."""
    definition = tokenizer.definition
    token = definition.begins_with if definition else None
    is_in_chat = stage is not None and token is not None and stage.chat.begins_with(token)
    if definition is None or token is None or bos is not False or is_in_chat:
        return
    known = tokenizer.bos_id is not None and definition.token_id(token) == tokenizer.bos_id
    how = "bos=True (--bos) of penstock.build"
    if not known:
        how = f'bos="{token}" (--bos-token "{token}") of penstock.build'
    does = f"{tokenizer.name} adds {token} at the beginning of each text"
    _log.warning("%s, but this build does not. To add it, use %s.", does, how)


_EDGE_ADVICE = {
    "eos": 'With penstock.build, name it with eos="TOKEN" (--eos-token TOKEN), or leave it out '
    "with eos=False (--no-eos).",
    "bos": 'With penstock.build, name it with bos="TOKEN" (--bos-token TOKEN), or leave it out '
    "with bos=False (--no-bos).",
}


def _edge_id(tokenizer: Tokenizer, wanted: bool | str, which: Literal["eos", "bos"]) -> int | None:
    """The id of the token that ends ("eos") or begins ("bos") each document, or None."""
    if wanted is False:
        return None
    if isinstance(wanted, str):
        return tokenizer.token_id(wanted)
    found = tokenizer.eos_id if which == "eos" else tokenizer.bos_id
    if found is None:
        raise TokenizerError(
            f"{tokenizer.name} does not say which of its tokens "
            f"{'ends' if which == 'eos' else 'begins'} a document. {_EDGE_ADVICE[which]}"
        )
    return found
