"""`penstock fetch`: download public datasets by name."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.options import argument, option
from penstock.cli.progress import bar, build_bar
from penstock.cli.tables import print_facts, store_json
from penstock.cli.terminal import console, print_json, shell_word, visible, write
from penstock.cli.units import duration_text, number_of, size_text

if TYPE_CHECKING:
    from penstock.catalog import Entry, Fetched, FetchProgress
    from penstock.store.reader import TokenStore


def fetch_command(
    name: Annotated[str | None, argument("The dataset; --list shows all names.", "NAME")] = None,
    directory: Annotated[
        Path | None,
        option("Target directory. By default data/NAME.", "DIRECTORY", "--output", "-o"),
    ] = None,
    source: Annotated[
        str | None,
        option(
            "A directory, file or URL to take the files from: a copy or a mirror.",
            "SOURCE",
            "--from",
        ),
    ] = None,
    split: Annotated[
        float | None,
        option(
            "Share of the text for training, if the dataset is one file. By default 0.9.", "SHARE"
        ),
    ] = None,
    build: Annotated[bool, option("Also build a store for each split.", None, "--build")] = False,
    tokenizer: Annotated[
        str, option("Tokenizer for --build, as in penstock build.", "NAME")
    ] = "gpt2",
    listed: Annotated[bool, option("List the datasets.", None, "--list")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Download a public dataset.

    If it is interrupted, the same command resumes. Files are verified, and files that are
    already there with the right contents are not requested again. Proxies are taken from
    the environment (https_proxy).

    penstock fetch tinyshakespeare --build

    penstock fetch openwebtext --output training_data
    """
    if listed:  # a NAME beside --list is ignored
        _list(as_json=as_json)
        return
    if name is None:
        raise typer.BadParameter("Give the NAME of a dataset; --list shows them.")
    from penstock.catalog import build_stores, fetch

    with bar(shown=not as_json) as draw:

        def report(now: "FetchProgress") -> None:
            # Without a known total, the bar is drawn as full.
            total = now.total_bytes or now.done_bytes
            draw(now.done_bytes, total, f"{now.action} {visible(now.name, lines=False)}")

        fetched = fetch(name, directory, source=source, split=split, progress=report)
    stores: dict[str, TokenStore] = {}
    if build:
        with build_bar(shown=not as_json) as (_, report_build):
            stores = build_stores(fetched, tokenizer=tokenizer, progress=report_build)
    if as_json:
        print_json(_to_json(fetched, stores))
    else:
        _show(fetched, stores)


def _to_json(fetched: "Fetched", stores: "dict[str, TokenStore]") -> dict[str, object]:
    return {
        "name": fetched.entry.name,
        "directory": str(fetched.directory),
        "raw": str(fetched.raw) if fetched.raw else None,
        "files": {
            split: {"path": str(path), "bytes": path.stat().st_size}
            for split, path in fetched.files.items()
        },
        "stores": {split: store_json(store) for split, store in stores.items()},
        "received_bytes": fetched.received_bytes,
        "seconds": round(fetched.seconds, 3),
    }


def _show(fetched: "Fetched", stores: "dict[str, TokenStore]") -> None:
    # The text before it was split is listed first, as "raw".
    rows = []
    for split, path in {**({"raw": fetched.raw} if fetched.raw else {}), **fetched.files}.items():
        row = f"{path.name}, {size_text(path.stat().st_size)}"
        if split in stores:
            tokens = number_of(stores[split].num_tokens, "token")
            row += f"; store {stores[split].path.name}, {tokens}"
        rows.append((split, row))
    if stores:
        from penstock.store.summary import describe_rules

        contents = next(iter(stores.values())).manifest.contents
        rows.append(("document is", describe_rules(contents["builds"])))
    received = f", {size_text(fetched.received_bytes)} received" if fetched.received_bytes else ""
    took = f"{duration_text(fetched.seconds)}{received}"
    title = f"{fetched.entry.name} is in {fetched.directory} ({took})"
    print_facts(title, [*rows, ("licence", fetched.entry.licence)])
    # Stores that this command built are current, so only older ones are checked.
    stale = [] if stores else _stale(fetched)
    if stale:
        texts = " and ".join(shell_word(fetched.files[split]) for split in stale)
        verb = "contains" if len(stale) == 1 else "contain"
        warning = f"{_store_paths(fetched, stale)} {verb} other text than {texts} now"
        console().print(warning, style="yellow", soft_wrap=True)
    write(f"next: {_next(fetched, stores, stale)}")


def _store_paths(fetched: "Fetched", splits: list[str]) -> str:
    return " and ".join(shell_word(fetched.directory / split) for split in splits)


def _stale(fetched: "Fetched") -> list[str]:
    """The splits whose stores were built from text that was split at another ratio."""
    from penstock.errors import StoreError
    from penstock.store.manifest import read_manifest

    found = []
    for split, path in fetched.files.items():
        # No store, or a damaged one: `penstock info` and `verify` report that.
        with suppress(StoreError):
            manifest = read_manifest(fetched.directory / split)
            sizes = {each["bytes"] for each in manifest.inputs}
            # The size is enough: another ratio cuts the text at another byte.
            if path.stat().st_size not in sizes:
                found.append(split)
    return found


def _next(fetched: "Fetched", stores: "dict[str, TokenStore]", stale: list[str]) -> str:
    """The command to suggest next."""
    if stores:
        return f"penstock info {shell_word(fetched.directory)}"
    entry, directory = fetched.entry, fetched.directory
    # A question set has no store to build or inspect.
    if entry.reader:
        return f"in Python, from penstock.catalog import {entry.reader}"
    split = (stale or list(fetched.files))[0]
    if not stale and (directory / split / "penstock.json").exists():
        return f"penstock info {shell_word(directory / split)}"
    # The same settings as `build_stores`, so that both ways give the same store.
    eos = "" if entry.eos else " --no-eos"
    before = f"delete {_store_paths(fetched, stale)}, then " if stale else ""
    text, store = shell_word(fetched.files[split]), shell_word(directory / split)
    is_auto = entry.documents == "auto"
    documents = "" if is_auto else f" --documents {shell_word(entry.documents)}"
    return f"{before}penstock build {text} -o {store} --format text{documents}{eos}"


def _list(*, as_json: bool) -> None:
    from penstock.catalog import ENTRIES

    if as_json:
        print_json({"entries": [_entry_to_json(entry) for entry in ENTRIES]})
        return
    for entry in ENTRIES:
        size = size_text(entry.num_bytes) if entry.num_bytes else _packed_size(entry)
        # Sixteen digits are enough to compare by eye. Not every server publishes a digest.
        digests = [remote.sha256[:16] if remote.sha256 else "none" for remote in entry.remotes]
        rows = [("what", entry.title), ("home", entry.home), ("licence", entry.licence)]
        title = f"{entry.name}, {size}: {', '.join(entry.splits)}"
        print_facts(title, [*rows, ("sha256", ", ".join(digests))])
    write("next: penstock fetch NAME")


def _packed_size(entry: "Entry") -> str:
    # Of some archives only the size of the download is known.
    packed = sum(remote.num_bytes or 0 for remote in entry.remotes)
    return f"{size_text(packed)} packed" if packed else "size not recorded"


def _entry_to_json(entry: "Entry") -> dict[str, object]:
    # `asdict` has the fields of an entry, but not its properties.
    return {**asdict(entry), "num_bytes": entry.num_bytes, "splits": list(entry.splits)}
