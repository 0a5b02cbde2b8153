"""Builds of conversations: from JSON records to tokens and loss masks.

A record is a line of JSON, in any format that `penstock.chat` knows. It becomes one document:
the tokens of the rendered conversation, and for each token whether it is trained on. Records
without a conversation, those that the template refuses, and those without trained tokens are
rejected with a reason, like any other record that is not a valid document.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader, RawIOBase
from typing import Any, cast

import numpy as np

from penstock.chat.chat import Chat, TurnReport
from penstock.chat.messages import ChatText, Columns, refuse_constant, to_conversation
from penstock.errors import ChatError, SourceError, StoreError
from penstock.options import BuildOptions
from penstock.sources.batch import Batch, Reject, text_offsets
from penstock.sources.files import InputFile, open_file
from penstock.sources.jsonl import json_problem
from penstock.sources.settings import Texts
from penstock.store.part import PartBuilder
from penstock.tokenize.tokenizer import load_tokenizer

# JSON arrays and tables are read whole, so their size is limited. Lines are read one by one.
_MAX_WHOLE = 1 << 30
_BLOCK_BYTES = 1 << 20
_BLANK = b"\xef\xbb\xbf \t\r\n"
_COMPARED = 200


@dataclass(frozen=True, slots=True)
class ChatStage:
    """Renders the conversations of a build as tokens."""

    chat: Chat
    eos: bool | str
    """The end token to add; False if the template ends turns itself."""
    report: TurnReport
    """Counts turns that are not trained on, or not up to their end."""
    columns: Columns | None = None
    """The columns of prompts and of completions; None if the keys of a record say what it is."""

    def fill(self, builder: PartBuilder, batch: Batch, first_file: int) -> list[Reject]:
        """Add the conversations of `batch` to a part; returns the records that were refused."""
        rendered = list(self._rendered(batch))
        counted = [script for script, _ in rendered if script is not None]
        self.report.add(counted, ended=builder.eos_id is not None)
        refused = {row: error for row, (_, error) in enumerate(rendered) if error is not None}
        rows = [row for row in range(len(rendered)) if row not in refused]
        scripts = [script for script, error in rendered if script is not None and error is None]
        if builder.eos_id is not None:
            scripts = [_closed(script) for script in scripts]
        encoded = self.chat.encode(scripts)
        trained = encoded.num_trained
        # A conversation may have trained characters and no trained token, if its tokens cover other
        # characters too. Such records are refused, and the others are encoded again.
        if not trained.all():
            refused |= {rows[place]: _untrained() for place in np.flatnonzero(trained == 0)}
            kept = np.flatnonzero(trained)
            rows, scripts = [rows[place] for place in kept], [scripts[place] for place in kept]
            encoded = self.chat.encode(scripts)
        tokens, ends, loss = builder.join(encoded.ids, encoded.offsets, loss=encoded.loss)
        origins = np.stack((batch.files[rows], batch.offsets[rows]), axis=1)
        builder.append((tokens, ends, origins, loss, 0))
        return _rejected(batch, refused, first_file)

    def compare(self, batch: Batch) -> None:
        """Compare the ids of the first conversations with those of the reference."""
        few = batch.where(np.arange(len(batch)) < _COMPARED)
        rendered = self._rendered(few)
        self.chat.compare([script for script, error in rendered if script and not error])

    def _rendered(self, batch: Batch) -> Iterator[tuple[ChatText | None, ChatError | None]]:
        """Each record as rendered text, and the error if the record is not stored."""
        for text in batch.texts.to_pylist():
            try:
                conversation = to_conversation(_parsed(text), self.columns)
                script = self.chat.render_text(conversation)
            except ChatError as error:
                yield None, error
                continue
            except RecursionError:
                yield None, ChatError("nested_too_deep", "The record has too many levels.")
                continue
            messages, rewritten = conversation.messages, len(script.rewritten)
            said = sum(message["role"] == "assistant" for message in messages)
            left = f", {rewritten} rewritten by the template" if rewritten else ""
            detail = f": {len(messages)} messages, {said} of the assistant{left}"
            yield script, None if script.trained else _untrained(detail)


def chat_stage(options: BuildOptions) -> ChatStage:
    """The stage for a build with `chat=`, which is a template or a `Chat`."""
    chat = options.chat
    if not isinstance(chat, Chat):
        chat = Chat(chat, load_tokenizer(options.tokenizer))
    eos = False if options.eos is True and chat.ends_turns else options.eos
    return ChatStage(chat, eos, chat.report(), columns_of(options.field))


def columns_of(field: str) -> Columns | None:
    """The columns of prompts and of completions in the setting `field`."""
    if field == "text":  # the default
        return None
    names = [name.strip() for name in field.split(",")]
    if len({*names}) != 2 or len(names) != 2 or not all(names):
        raise StoreError(
            f"field={field!r} (--field) does not name one column of prompts and one of "
            'completions, such as field="question,answer". Leave it out for records of messages.'
        )
    return names[0], names[1]


def chat_file(file: InputFile) -> InputFile:
    """An input as a file in which each line is a record.

    JSON arrays and tables are read whole, and their elements become texts. A single line may also
    be an array of messages. So a file that begins with `[` is one array of records only if its
    first line is not a complete array, or if nothing follows that line.
    """
    if file.texts is not None:
        return file
    if file.format in ("csv", "tsv"):
        raise SourceError(
            f"{file.name} is {file.format.upper()}, and conversations are read from JSON Lines, "
            "JSON arrays, Parquet and Arrow. Convert it to one of these."
        )
    is_table = file.format in ("parquet", "arrow")
    if not is_table and (file.compression is not None or _is_lines(file)):
        return replace(file, format="text")
    if file.size > _MAX_WHOLE:
        raise SourceError(
            f"{file.name} has {file.size:,} bytes, and an array or a table of conversations "
            "is read whole. Convert it to JSON Lines, one conversation per line."
        )
    records = _table_rows(file) if is_table else _array_items(file)
    # `default`: a table may hold dates and other values that JSON does not have.
    texts = Texts([json.dumps(record, ensure_ascii=False, default=str) for record in records])
    return replace(file, format="texts", texts=texts)


def _is_lines(file: InputFile) -> bool:
    """Whether each line is a record; otherwise the file is one array of records."""
    with BufferedReader(cast(RawIOBase, open_file(file)), _BLOCK_BYTES) as stream:
        line = b""
        while not line and (found := stream.readline(_MAX_WHOLE)):  # the first that is not blank
            line = found.strip(_BLANK)
        more = any(block.strip() for block in iter(partial(stream.read, _BLOCK_BYTES), b""))
    if line[:1] != b"[":
        return True
    try:
        json.loads(line)
    except ValueError:
        return False
    return more


def _array_items(file: InputFile) -> list[Any]:
    with open_file(file) as stream:
        data = stream.read()
    try:
        items: list[Any] = json.loads(data)
    except ValueError as error:
        raise SourceError(
            f"{file.name} begins with [ but is not a valid JSON array: {error}. Use an array "
            "of conversations, or JSON Lines with one conversation per line."
        ) from None
    is_message = [isinstance(each, dict) and ("role" in each or "from" in each) for each in items]
    # An array of messages is one conversation.
    return [items] if items and all(is_message) else items


def _table_rows(file: InputFile) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_file(file) as stream:
        if file.format == "parquet":
            batches = pq.ParquetFile(stream).iter_batches()
        else:
            batches = iter(pa.ipc.open_stream(stream))
        for batch in batches:
            yield from batch.to_pylist()


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        found = json_problem(error) if isinstance(error, json.JSONDecodeError) else error
        raise ChatError("bad_json", f"The record is not JSON: {found}.") from None


def _untrained(detail: str = "") -> ChatError:
    return ChatError("nothing_to_train", f"No token is trained on{detail}.")


def _closed(script: ChatText) -> ChatText:
    """`script` with the blanks at its end trained on, if they follow a trained turn.

    The end token comes after these blanks and is trained on, so they must be too.
    """
    start, stop = script.trained[-1]
    if script.text[stop:].strip():
        return script
    return replace(script, trained=[*script.trained[:-1], (start, len(script.text))])


def _rejected(batch: Batch, refused: dict[int, ChatError], first_file: int) -> list[Reject]:
    """Return the refused records, and count them as rejects in the tally of the batch."""
    sizes = np.diff(text_offsets(batch.texts))
    rejects = []
    for row, error in sorted(refused.items()):
        size, reason, detail = int(sizes[row]), error.reason, str(error)
        file, offset = int(batch.files[row]) - first_file, int(batch.offsets[row])
        reject = Reject(file=file, offset=offset, num_bytes=size, reason=reason, detail=detail)
        rejects.append(reject)
        # The reader counted the record as a document. A record that counts twice would make the
        # sum of all bytes wrong.
        batch.tally.documents -= 1
        batch.tally.rejected += 1
        batch.tally.document_bytes -= size
        batch.tally.rejected_bytes += size
        batch.tally.text_bytes -= size
    return rejects
