"""A build of a finished store as a job that can be run again, from what the manifest records.

The manifest records names, sizes and digests of the inputs, and no directories. Inputs are looked
for in the directories that the user names, and where the build found them, if it ran on this
machine. An input that cannot be used is a problem only if its text is needed.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.digest import canonical_json
from penstock.errors import SourceError, StoreError
from penstock.sources.files import STDIN, InputFile
from penstock.sources.listing import list_files
from penstock.sources.settings import ReadSettings, Texts
from penstock.store.inputs import read_digests, read_stamps, recorded_digest
from penstock.store.job import BuildSettings, Job
from penstock.store.manifest import JsonObject, Manifest, shared_settings
from penstock.store.verify import comparable
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

if TYPE_CHECKING:
    from penstock.store.chats import ChatStage

Place = str | os.PathLike[str] | Texts
"""A directory that holds inputs, an input file, or texts that were in memory."""

_SHOWN = 5
_BUILT_IN = ("chatml", "nanochat")


@dataclass(frozen=True, slots=True)
class RecordedBuild:
    """One build of a finished store: its first build, or an append."""

    directory: Path
    manifest: Manifest
    number: int

    @property
    def entry(self) -> JsonObject:
        """What the manifest says of this build."""
        entry: JsonObject = self.manifest.builds[self.number]
        return entry

    @property
    def first_part(self) -> int:
        """How many slices the earlier builds of the store have."""
        return sum(done["slices"] for done in self.manifest.builds[: self.number])

    def job(
        self, places: Sequence[Place], tokenizer: object, chat: object, threads: int | None
    ) -> tuple[Job, list[str]]:
        """The job that made this build, and what is wrong with its inputs."""
        contents, reading = self.manifest.contents, self._reading()
        loaded = _tokenizer(self.manifest, tokenizer)
        stage = None if "chat" not in contents else _chat_stage(contents["chat"], loaded, chat)
        inputs = comparable(self.entry["inputs"])
        files, problems = self._files(inputs, places, reading, stage is not None)
        settings = BuildSettings(
            inputs=(),
            store=self.directory,
            tokenizer=loaded,
            format=reading.format,
            documents=reading.documents,
            field=reading.field,
            errors=reading.errors,
            newlines=reading.newlines,
            eos=False,
            bos=False,
            special_tokens=loaded.special_tokens,
            max_bad=inf,  # the build accepted its rejects
            max_document_bytes=reading.max_document_bytes,
            max_expansion=reading.max_expansion,
            engine="auto",
            threads=threads,
            split=contents["split"],
            read_back=True,  # the disk has damaged a file before
        )
        recorded = {
            **shared_settings(contents),
            "reading": self.entry["reading"],
            "inputs": inputs,
            "append": self.number > 0,
        }
        used = loaded if stage is None else stage.chat.tokenizer
        job = Job(
            settings,
            self.directory,
            files,
            reading,
            used,
            recorded,
            stage,
            first_build=self.number,
            first_file=sum(len(done["inputs"]) for done in self.manifest.builds[: self.number]),
            first_part=self.first_part,
        )
        return job, problems

    def _reading(self) -> ReadSettings:
        recorded = dict(self.entry["reading"])
        if "imported" in recorded:
            raise StoreError(
                f"{self.directory} was imported from token files, and only builds can be repaired. "
                "Delete it, and import the token files again with `penstock import`."
            )
        if "separators" in recorded:
            recorded["separators"] = tuple(recorded["separators"])
        try:
            return ReadSettings(**recorded)
        except (TypeError, AttributeError, SourceError) as error:
            raise StoreError(
                f"{self.directory} was built with a setting that this version of penstock does not "
                f"know: {error}. Repair it with the version that built it."
            ) from None

    def _files(
        self,
        inputs: list[JsonObject],
        places: Sequence[Place],
        reading: ReadSettings,
        is_chat: bool,
    ) -> tuple[list[InputFile], list[str]]:
        """The inputs as files, and a description of each that is missing or of another size."""
        stamps = read_stamps(self.directory, self.manifest.digest)
        files, problems = [], []
        for number, entry in enumerate(inputs):
            found = _listed(_candidates(entry["name"], places, stamps), entry, reading, is_chat)
            size, kind = entry["bytes"], str(entry.get("format"))
            if found is not None and (found.size, found.format) == (size, kind):
                files.append(replace(found, name=entry["name"]))
                continue
            problems.append(_problem(entry, self._digest(number), found))
            # Reading it raises an error: the file does not exist, or has another size.
            path = f"{os.devnull}/missing" if found is None else found.path
            how = entry.get("compression")
            missing = InputFile(
                name=entry["name"], path=path, size=size, stamp="", format=kind, compression=how
            )
            files.append(missing)
        return files, problems

    def _digest(self, number: int) -> str | None:
        return recorded_digest(self.entry["inputs"][number])

    def changed_inputs(self, job: Job, slices: Iterable[int]) -> list[str]:
        """The inputs of some slices that have another digest now."""
        wanted = set(slices)
        used = {s.file for piece in job.slices() if piece.index in wanted for s in piece.spans}
        recorded = {n: digest for n in used or range(len(job.files)) if (digest := self._digest(n))}
        now = read_digests(job.files, job.slices(), recorded)
        return [
            f"{job.files[number].name} has the digest {str(now.get(number))[:8]}…, and the store "
            f"was built from {digest}"
            for number, digest in sorted(recorded.items())
            if now.get(number) != digest
        ]


def _problem(entry: JsonObject, digest: str | None, found: InputFile | None) -> str:
    """Why an input cannot be used, and what it was when the store was built."""
    if entry["name"] == STDIN:
        return f"{STDIN} was standard input, which cannot be read again (digest {digest})"
    if found is not None:
        state = f"has {found.size:,} bytes ({found.format}), and the store was built from"
    elif entry["name"].startswith("texts-"):
        state = "was in memory, and must be given again as inputs=Texts(…); it had"
    else:
        state = "is missing; it had"
    expected = f"{entry['bytes']:,} bytes" + (f" with the digest {digest}" if digest else "")
    return f"{entry['name']} {state} {expected}"


def _candidates(name: str, places: Sequence[Place], stamps: dict[str, str]) -> list[Place]:
    """Where the input with the recorded name `name` may be; the user's places come first."""
    # A downloaded file has the last part of its address as its name.
    last = name.rpartition("/")[2]
    below = last if "://" in name else name
    found: list[Place] = []
    for place in places:
        if isinstance(place, Texts):
            found.append(place)
        elif Path(place).is_dir():
            found.append(Path(place) / below)
        elif Path(place).name == last:
            found.append(place)
    if not places and "://" not in name:
        found += [path for path in stamps if Path("/", path).as_posix().endswith(f"/{name}")]
    return found


def _listed(
    candidates: Sequence[Place], entry: JsonObject, reading: ReadSettings, is_chat: bool
) -> InputFile | None:
    """The first of the candidates that exists; one with the recorded size is preferred."""
    found = []
    for each in candidates:
        if isinstance(each, Texts) or Path(each).is_file():
            (file,) = list_files(each if isinstance(each, Texts) else [each], reading)
            if is_chat:
                from penstock.store.chats import chat_file

                file = chat_file(file)
            # The name of texts contains their digest.
            if not isinstance(each, Texts) or file.name == entry["name"]:
                found.append(file)
    return min(found, key=lambda file: file.size != entry["bytes"], default=None)


def _tokenizer(manifest: Manifest, given: object) -> Tokenizer:
    """The tokenizer of the store, which treats special tokens in a text as the build did."""
    found = tokenizer_of(manifest.contents["tokenizer"], given)
    how = manifest.contents["tokenizer"].get("special_tokens", "text")
    if how == found.special_tokens:
        return found
    return load_tokenizer(found.definition or found, special_tokens=how)


def _chat_stage(entry: JsonObject, tokenizer: Tokenizer, given: object) -> "ChatStage":
    """The stage that rendered the conversations of a store."""
    from penstock.chat.chat import Chat
    from penstock.store.chats import ChatStage

    if given is None and entry["template"] not in _BUILT_IN:
        raise StoreError(
            f"The conversations were rendered with the chat template {entry['template']}, which is "
            "not in the store. Give it with chat= (--chat) of penstock.repair."
        )
    names = ("rewritten", "borders", "special_in_content", "settings", "date")
    options = {name: entry[name] for name in names}
    template = entry["template"] if given is None else given
    chat = template if isinstance(template, Chat) else Chat(template, tokenizer, **options)
    now = {**chat.describe(), "template": entry["template"]}
    if canonical_json(now) != canonical_json(entry):
        raise StoreError(
            f"The conversations were rendered with the chat template {entry['template']} (digest "
            f"{entry['digest'][:8]}…), and the template {chat.template.name} has the digest "
            f"{chat.template.digest[:8]}… or other settings. Give the template of the store with "
            "chat= (--chat) of penstock.repair."
        )
    return ChatStage(chat, False, chat.report())
