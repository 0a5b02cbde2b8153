"""What a build has to do, and how far it is."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.sources.listing import InputFile
from penstock.sources.reading import Reading
from penstock.store.journal import SealedSlice
from penstock.store.split import Split
from penstock.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.store.chat import ChatStage

__all__ = ["Job", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build is; what a progress callback is given."""

    done_bytes: int
    total_bytes: int
    """On disk, so for compressed inputs less than the text they hold."""
    text_bytes: int
    num_documents: int
    num_tokens: int
    num_rejects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a worker needs to know."""

    directory: Path
    files: list[InputFile]
    first_file: int
    """How many input files earlier builds of the same store have."""
    reading: Reading
    tokenizer: Tokenizer
    eos_id: int | None
    bos_id: int | None
    split: Split | None
    first_part: int
    """How many slices earlier builds of the same store have."""
    max_bad: float
    """A share of all records if below 1, else a number of them."""
    chat: "ChatStage | None" = None
    """Renders documents that are conversations."""
    live: bool = False
    """Whether parts are read while others are made. The first slice is then made by all threads
    together and the others by one, as long as nobody waits; parts are announced before they are on
    disk, and the comparison with the reference waits until the first of them is sealed."""
    sealing: Callable[[SealedSlice], AbstractContextManager[None]] = lambda _: nullcontext()
    """Entered with each slice before anybody hears of it, and left when its record is written."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the run ends, also by an error: for slices that are waited for."""

    def side_directory(self, side: str) -> Path:
        """Where the parts of one side of the split go."""
        return self.directory / side if side else self.directory
