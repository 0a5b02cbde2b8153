"""`penstock fetch`: public datasets by name."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson
from penstock.cli.progress import bar, build_bar
from penstock.cli.tables import facts
from penstock.cli.terminal import console, print_json, shell_word, visible
from penstock.cli.units import duration_text, number_of, size_text

if TYPE_CHECKING:
    from penstock.catalog.entries import Entry
    from penstock.catalog.fetch import Fetched, FetchProgress
    from penstock.store.reader import TokenStore

__all__ = ["fetch_command"]


def fetch_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", show_default=False, help="Which; --list shows them."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIRECTORY",
            show_default=False,
            help="Where to; data/NAME if not given.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            show_default=False,
            help="A directory, file or URL to take the files from: a mirror, or a copy that was "
            "carried here.",
        ),
    ] = None,
    split: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            show_default=False,
            help="How much of a text that comes as one file is for training; 0.9 if not given.",
        ),
    ] = None,
    build: Annotated[bool, typer.Option("--build", help="Also build a store a side.")] = False,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="Of these stores, as in penstock build.")
    ] = "gpt2",
    listed: Annotated[bool, typer.Option("--list", help="Show what there is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a public dataset.

    Safe to kill: the same command goes on where it stopped. Files are checked, and those
    that are there and right are not requested again. Proxies are taken from the
    environment (https_proxy).

    penstock fetch tinyshakespeare --build

    penstock fetch openwebtext --output training_data
    """
    if listed:
        _list(as_json=as_json)
        return
    if name is None:
        raise typer.BadParameter("Give the NAME of a dataset, or --list to see them.")
    fetched = _fetched(name, directory, source, split, shown=not as_json)
    stores = _built(fetched, tokenizer, shown=not as_json) if build else {}
    if as_json:
        print_json(_spell(fetched, stores))
    else:
        _show(fetched, stores)


def _fetched(
    name: str, directory: Path | None, source: str | None, split: float | None, *, shown: bool
) -> "Fetched":
    from penstock.catalog.fetch import fetch

    with bar(shown=shown) as draw:

        def tell(now: "FetchProgress") -> None:
            total = now.total_bytes or now.done_bytes
            draw(now.done_bytes, total, f"{now.action} {visible(now.name, lines=False)}")

        return fetch(name, directory, source=source, split=split, progress=tell)


def _built(fetched: "Fetched", tokenizer: str, *, shown: bool) -> "dict[str, TokenStore]":
    from penstock.catalog.fetch import build_stores

    with build_bar(shown=shown) as (_, tell):
        return build_stores(fetched, tokenizer=tokenizer, progress=tell)


def _spell(fetched: "Fetched", stores: "dict[str, TokenStore]") -> dict[str, Any]:
    return {
        "name": fetched.entry.name,
        "directory": str(fetched.directory),
        "raw": str(fetched.raw) if fetched.raw else None,
        "files": {
            side: {"path": str(path), "bytes": path.stat().st_size}
            for side, path in fetched.files.items()
        },
        "stores": {
            side: {
                "path": str(store.path),
                "num_documents": store.manifest.num_documents,
                "num_tokens": store.num_tokens,
                "digest": store.digest,
            }
            for side, store in stores.items()
        },
        "received_bytes": fetched.received_bytes,
        "seconds": round(fetched.seconds, 3),
    }


def _show(fetched: "Fetched", stores: "dict[str, TokenStore]") -> None:
    out = console()
    where = visible(str(fetched.directory), lines=False)
    came = f", {size_text(fetched.received_bytes)} received" if fetched.received_bytes else ""
    took = duration_text(fetched.seconds)
    out.print(f"{fetched.entry.name} is in {where} ({took}{came})", style="bold", soft_wrap=True)
    rows = []
    for side, path in {**({"raw": fetched.raw} if fetched.raw else {}), **fetched.files}.items():
        told = f"{path.name}, {size_text(path.stat().st_size)}"
        if side in stores:
            tokens = number_of(stores[side].num_tokens, "token")
            told += f"; store {visible(stores[side].path.name)}, {tokens}"
        rows.append((side, told))
    if stores:
        from penstock.store.rules import describe_rules

        contents = next(iter(stores.values())).manifest.contents
        rows.append(("document is", visible(describe_rules(contents["builds"]), lines=False)))
    out.print(facts([*rows, ("licence", fetched.entry.licence)]))
    stale = [] if stores else _stale(fetched)
    if stale:
        texts = " and ".join(shell_word(fetched.files[side]) for side in stale)
        verb = "holds" if len(stale) == 1 else "hold"
        told = f"{_places(fetched, stale)} {verb} other text than {texts} now"
        out.print(told, style="yellow", soft_wrap=True)
    out.print(f"next: {_next(fetched, stores, stale)}", soft_wrap=True)


def _places(fetched: "Fetched", sides: list[str]) -> str:
    return " and ".join(shell_word(fetched.directory / side) for side in sides)


def _stale(fetched: "Fetched") -> list[str]:
    """The sides whose stores, from an earlier fetch, are of text that was split otherwise."""
    from penstock.errors import StoreError
    from penstock.store.manifest import builds, read_manifest

    found = []
    for side, path in fetched.files.items():
        with suppress(StoreError):  # there is none, or it is damaged, which others tell
            manifest = read_manifest(fetched.directory / side)
            sizes = {each["bytes"] for done in builds(manifest) for each in done["inputs"]}
            if path.stat().st_size not in sizes:
                found.append(side)
    return found


def _next(fetched: "Fetched", stores: "dict[str, TokenStore]", stale: list[str]) -> str:
    """The command that a reader most likely wants."""
    if stores:
        return f"penstock info {shell_word(fetched.directory)}"
    entry, directory = fetched.entry, fetched.directory
    if entry.reader:
        return f"in Python, from penstock.catalog import {entry.reader}"
    side = (stale or list(fetched.files))[0]
    if not stale and (directory / side / "penstock.json").exists():
        return f"penstock info {shell_word(directory / side)}"
    eos = "" if entry.eos else " --no-eos"
    before = f"delete {_places(fetched, stale)}, then " if stale else ""
    text, store = shell_word(fetched.files[side]), shell_word(directory / side)
    is_auto = entry.documents == "auto"
    documents = "" if is_auto else f" --documents {shell_word(entry.documents)}"
    return f"{before}penstock build {text} -o {store} --format text{documents}{eos}"


def _list(*, as_json: bool) -> None:
    from penstock.catalog.entries import ENTRIES

    if as_json:
        print_json({"entries": [_spell_entry(entry) for entry in ENTRIES]})
        return
    out = console()
    for entry in ENTRIES:
        size = size_text(entry.num_bytes) if entry.num_bytes else _packed_text(entry)
        out.print(f"{entry.name}, {size}: {', '.join(entry.sides)}", style="bold", soft_wrap=True)
        digests = [remote.sha256[:16] if remote.sha256 else "none" for remote in entry.remotes]
        rows = [("what", entry.title), ("home", entry.home), ("licence", entry.licence)]
        out.print(facts([*rows, ("sha256", ", ".join(digests))]))
    out.print("next: penstock fetch NAME")


def _packed_text(entry: "Entry") -> str:
    packed = sum(remote.num_bytes or 0 for remote in entry.remotes)
    return f"{size_text(packed)} packed" if packed else "size not recorded"


def _spell_entry(entry: "Entry") -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(entry), "num_bytes": entry.num_bytes, "sides": list(entry.sides)}
