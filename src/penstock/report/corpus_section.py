"""The part of a page that is about stores and token files."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.cli.terminal import visible
from penstock.cli.units import number_of, size_text
from penstock.disk import NamedFile
from penstock.formats.token_files import Member
from penstock.inspect.members import documents_of_parts
from penstock.report.corpus import (
    MOST_HASHED,
    MOST_TOKENS,
    Duplicates,
    Ids,
    TokenCounts,
    count_tokens,
    document_ids,
    find_duplicates,
    find_tokenizer,
    measure_lengths,
    num_tokens,
    spread_documents,
)
from penstock.report.figures import Chart, Table, length_histogram
from penstock.report.subject import Subject
from penstock.store.manifest import rejects_file
from penstock.store.reader import TokenStore
from penstock.store.summary import Lengths, Summary, summarize
from penstock.tokenize.tokenizer import Tokenizer

_MOST_CORPORA = 6
_SHOWN_CHARACTERS = 160
_SHOWN_REJECTS = 5
_READ_BYTES = 1 << 16
_SAMPLED_DOCUMENTS = 64
Context = dict[str, object]
Facts = list[tuple[str, str]]


def corpus(subject: Subject) -> Context:
    """Return the measurements of the largest stores, and a table of all."""
    members = subject.corpora
    largest = sorted(members, key=lambda name: -num_tokens(members[name]))[:_MOST_CORPORA]
    share = max(1, len(largest))
    table = None
    if len(members) > 1:
        rows = [_table_row(name, each) for name, each in members.items()]
        table = Table(
            ("source", "documents", "tokens", "tokenizer", "path"), rows, ends_in_text=True
        )
    return {
        "table": table,
        "left_out": len(members) - len(largest),
        "corpora": [
            _describe(name, members[name], subject, share) for name in members if name in largest
        ],
    }


def _table_row(name: str, member: Member) -> tuple[str, ...]:
    documents = f"{int(documents_of_parts(member).sum()):,}" if member.has_documents else "-"
    record = member.tokenizer_record
    tokenizer = "-" if record is None else str(record["name"])
    return name, documents, f"{num_tokens(member):,}", tokenizer, str(member.path)


def _describe(name: str, member: Member, subject: Subject, share: int) -> Context:
    """Return what the page shows of one store; `share` stores share the time for samples."""
    summary = summarize(member) if isinstance(member, TokenStore) else None
    lengths = measure_lengths(member) if summary is None else summary.lengths
    tokenizer = find_tokenizer(member, subject.tokenizer)
    tokens = count_tokens(member, MOST_TOKENS // share)
    found = find_duplicates(member, MOST_HASHED // share)
    charts: list[Chart] = []
    if lengths is not None and lengths.min < lengths.max:
        charts.append(length_histogram(lengths.histogram, name))
    return {
        "name": name,
        "facts": _facts(member, summary, lengths, tokens, tokenizer),
        "charts": charts,
        "tokens": _token_table(tokens, tokenizer),
        "token_scope": tokens.scope,
        "duplicates": found,
        "duplicate_facts": [] if found is None else _duplicate_facts(found),
        "duplicate_table": None if found is None else _duplicate_table(member, found, tokenizer),
        "rejects": None if summary is None else _rejects(summary),
        "reject_examples": _reject_examples(member),
    }


def _facts(
    member: Member,
    summary: Summary | None,
    lengths: Lengths | None,
    tokens: TokenCounts,
    tokenizer: Tokenizer | None,
) -> Facts:
    record = member.tokenizer_record
    facts = [("tokens", f"{num_tokens(member):,}")]
    if member.has_documents:
        count = int(documents_of_parts(member).sum()) if summary is None else summary.num_documents
        facts.insert(0, ("documents", f"{count:,}"))
    if lengths is not None:
        facts.append(("length", f"median {lengths.median:,}, mean {lengths.mean:,.1f}"))
        facts.append(("longest", f"{lengths.max:,} tokens"))
    if summary is not None and summary.bytes_per_token:
        facts.append(("tokens per byte", f"{1 / summary.bytes_per_token:.4f}"))
    elif tokenizer is not None and member.has_documents:
        facts.append(("tokens per byte", _measured_ratio(member, tokenizer)))
    size = None if tokenizer is None else tokenizer.vocab_size
    used = f"{tokens.num_distinct:,}" + ("" if size is None else f" of {size:,}")
    facts.append(("ids that occur", used))
    facts.append(("tokenizer", "not recorded" if record is None else str(record["name"])))
    if summary is not None:
        facts += _store_facts(summary)
    facts.append(("digest", member.digest[:16]))
    return facts


def _store_facts(summary: Summary) -> Facts:
    names = [str(each["name"]) for each in summary.inputs]
    inputs = names[0] if len(names) == 1 else f"{len(names):,} files"
    facts = [
        ("a document is", summary.documents),
        ("inputs", inputs),
        (
            "on disk",
            f"{size_text(summary.disk_bytes)} in {number_of(summary.num_parts, 'part')}",
        ),
        ("blank records skipped", f"{summary.num_skipped:,}"),
    ]
    if summary.num_trained is not None:
        share = summary.num_trained / max(1, summary.num_tokens)
        facts.insert(0, ("trained on", f"{summary.num_trained:,} tokens, {share:.1%}"))
    return facts


def _measured_ratio(member: Member, tokenizer: Tokenizer) -> str:
    """Return the tokens per byte of some documents, for tokens whose text was not counted."""
    count = size = 0
    for number in spread_documents(member, _SAMPLED_DOCUMENTS):
        ids, _ = document_ids(member, number)
        count, size = count + len(ids), size + len(tokenizer.decode_bytes(ids))
    return f"{count / max(1, size):.4f}, of {_SAMPLED_DOCUMENTS} documents at equal distances"


def _token_table(found: TokenCounts, tokenizer: Tokenizer | None) -> list[Context]:
    """Return the most frequent tokens; `share` is relative to the most frequent one."""
    first = max([1, *(count for _, count in found.most_frequent)])
    return [
        {
            "id": number,
            "text": "" if tokenizer is None else _quoted(tokenizer, number),
            "count": f"{count:,}",
            "percent": f"{count / max(1, found.num_counted):.2%}",
            "share": round(100 * count / first, 1),
        }
        for number, count in found.most_frequent
    ]


def _quoted(tokenizer: Tokenizer, number: int) -> str:
    """Return the text of a token, with spaces and line ends that can be seen."""
    data = tokenizer.decode_bytes([number])
    text = visible(data.decode(errors="backslashreplace"), lines=False)
    return text.replace(" ", "␣")


def _duplicate_facts(found: Duplicates) -> Facts:
    share = found.num_repeats / max(1, found.num_compared)
    return [
        ("documents compared", f"{found.num_compared:,}"),
        ("equal to an earlier one", f"{found.num_repeats:,}, {share:.2%}"),
        ("tokens in them", f"{found.num_repeated_tokens:,}"),
    ]


def _duplicate_table(member: Member, found: Duplicates, tokenizer: Tokenizer | None) -> Table:
    rows = []
    for number, count in found.most_frequent:
        ids, _ = document_ids(member, number)
        rows.append((f"{number:,}", f"{count:,}", f"{len(ids):,}", _beginning(ids, tokenizer)))
    return Table(("first document", "occurs", "tokens", "text"), rows, ends_in_text=True)


def _beginning(ids: Ids, tokenizer: Tokenizer | None) -> str:
    """Return the first characters of a document on one line; its ids if there is no tokenizer."""
    some = ids[:_SHOWN_CHARACTERS]
    if tokenizer is None:
        return " ".join(map(str, some[:20].tolist()))
    text = tokenizer.decode(some)
    more = " …" if len(text) > _SHOWN_CHARACTERS or len(some) < len(ids) else ""
    return visible(text[:_SHOWN_CHARACTERS], lines=False) + more


def _rejects(summary: Summary) -> Table:
    rows = [(reason, f"{count:,}") for reason, count in summary.rejects.items()]
    return Table(("reason", "records"), rows)


def _reject_examples(member: Member) -> Table:
    return Table(("file", "offset", "reason"), list(_reject_rows(member)), ends_in_text=True)


def _reject_rows(member: Member) -> Iterator[tuple[str, str, str]]:
    """Yield the first lines of the reject log of a store on this machine."""
    path = member.path
    if not isinstance(member, TokenStore) or not isinstance(path, Path):
        return
    with suppress(OSError), NamedFile(path / rejects_file(0)) as stream:
        # The last line may be cut, and a log may be damaged: these lines are left out.
        for line in stream.read(_READ_BYTES).split(b"\n")[:_SHOWN_REJECTS]:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    file, offset, reason = (
                        visible(str(found.get(each, "")), lines=False)
                        for each in ("file", "offset", "reason")
                    )
                    yield file, offset, reason
