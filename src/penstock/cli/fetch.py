"""`penstock fetch`: download public datasets by name."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options, terminal
from penstock.cli.options import argument, option, path_option, with_flags
from penstock.cli.progress import bar, build_bar
from penstock.cli.units import duration_text, number_of, size_text
from penstock.errors import StoreError
from penstock.options import BuildOptions

if TYPE_CHECKING:
    from penstock.catalog import Fetched, FetchProgress
    from penstock.store.reader import TokenStore


@with_flags(BuildOptions, "tokenizer")
def fetch_command(
    name: Annotated[str | None, argument("The dataset; --list shows all names.", "NAME")] = None,
    directory: Annotated[
        Path | None,
        path_option("Directory to write to. By default data/NAME.", "DIRECTORY", "--output", "-o"),
    ] = None,
    source: Annotated[
        str | None,
        option(
            "Where to read a copy of the dataset: a directory, file or URL.", "SOURCE", "--from"
        ),
    ] = None,
    split: Annotated[
        float | None,
        option(
            "The share of the text for training, if the dataset is one file. By default 0.9.",
            "SHARE",
        ),
    ] = None,
    build: Annotated[bool, option("Also build a store for each split.", None, "--build")] = False,
    listed: Annotated[bool, option("List the datasets.", None, "--list")] = False,
    as_json: options.AsJson = False,
    **given: Any,
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
            name = terminal.visible(now.name, lines=False)
            text = f"{now.action} {name}, {size_text(now.done_bytes)}"
            draw(now.done_bytes, now.total_bytes or 0, text)

        fetched = fetch(name, directory, source=source, split=split, progress=report)
    stores: dict[str, TokenStore] = {}
    if build:
        with build_bar(shown=not as_json) as (_, report_build):
            stores = build_stores(fetched, tokenizer=given["tokenizer"], progress=report_build)
    if as_json:
        terminal.print_json(_to_json(fetched, stores))
    else:
        _show(fetched, stores)


def _to_json(fetched: "Fetched", stores: "dict[str, TokenStore]") -> dict[str, object]:
    sizes = {split: path.stat().st_size for split, path in fetched.files.items()}
    return {
        "name": fetched.entry.name,
        "directory": str(fetched.directory),
        "raw": str(fetched.raw) if fetched.raw else None,
        "files": {
            split: {"path": str(fetched.files[split]), "bytes": size}
            for split, size in sizes.items()
        },
        "stores": {split: terminal.store_json(store) for split, store in stores.items()},
        "received_bytes": fetched.received_bytes,
        "seconds": round(fetched.seconds, 3),
    }


def _show(fetched: "Fetched", stores: "dict[str, TokenStore]") -> None:
    # The text before it was split is listed first, as "raw".
    files = {"raw": fetched.raw, **fetched.files} if fetched.raw else fetched.files
    rows = {
        split: f"{path.name}, {size_text(path.stat().st_size)}" for split, path in files.items()
    }
    for split, store in stores.items():
        rows[split] += f"; store {store.path.name}, {number_of(store.num_tokens, 'token')}"
    if stores:
        from penstock.store.summary import describe_rules

        rows["document is"] = describe_rules(store.manifest.contents)
    received = f", {size_text(fetched.received_bytes)} received" if fetched.received_bytes else ""
    took = f"{duration_text(fetched.seconds)}{received}"
    title = f"{fetched.entry.name} is in {fetched.directory} ({took})"
    terminal.print_facts(title, [*rows.items(), ("licence", fetched.entry.licence)])
    info = f"penstock info {terminal.shell_word(fetched.directory)}"
    terminal.write(f"next: {info if stores else _next(fetched)}")


def _next(fetched: "Fetched") -> str:
    """The command to suggest next."""
    from penstock.store.manifest import FILE_NAME, read_manifest

    entry, paths = fetched.entry, fetched.files
    # A question set has no store to build or inspect.
    if entry.reader:
        return f"in Python, from penstock.catalog import {entry.reader}"
    words = {split: terminal.shell_word(fetched.directory / split) for split in paths}
    built = [split for split in paths if (fetched.directory / split / FILE_NAME).exists()]
    stale: list[str] = []
    for split in built:
        with suppress(StoreError):  # `penstock info` and `verify` report a damaged store
            inputs = read_manifest(fetched.directory / split).inputs
            sizes = {each["bytes"] for each in inputs}
            # The size is enough: another ratio cuts the text at another byte.
            stale += [] if paths[split].stat().st_size in sizes else [split]
    if stale:
        stores = " and ".join(words[split] for split in stale)
        texts = " and ".join(terminal.shell_word(paths[split]) for split in stale)
        verb = "contains" if len(stale) == 1 else "contain"
        warning = f"{stores} {verb} other text than {texts} now"
        terminal.console().print(warning, style="yellow", soft_wrap=True)
    elif built:
        return f"penstock info {words[built[0]]}"
    # The same settings as `build_stores`, so that both ways give the same store.
    split = (stale or list(paths))[0]
    before = f"delete {stores}, then " if stale else ""
    text = terminal.shell_word(paths[split])
    command = f"{before}penstock build {text} -o {words[split]} --format text"
    if entry.documents != "auto":
        command += f" --documents {terminal.shell_word(entry.documents)}"
    return command if entry.eos else f"{command} --no-eos"


def _list(*, as_json: bool) -> None:
    from penstock.catalog import ENTRIES

    if as_json:
        # `asdict` has the fields of an entry, but not its properties.
        more = [{"num_bytes": each.num_bytes, "splits": list(each.splits)} for each in ENTRIES]
        listed = [{**asdict(entry), **extra} for entry, extra in zip(ENTRIES, more, strict=True)]
        terminal.print_json({"entries": listed})
        return
    for entry in ENTRIES:
        # Of some archives only the size of the download is known.
        packed = sum(remote.num_bytes or 0 for remote in entry.remotes)
        size = f"{size_text(packed)} packed" if packed else "size not recorded"
        if entry.num_bytes:
            size = size_text(entry.num_bytes)
        # Sixteen digits are enough to compare by eye. Not every server publishes a digest.
        digests = [remote.sha256[:16] if remote.sha256 else "none" for remote in entry.remotes]
        rows = [("what", entry.title), ("home", entry.home), ("licence", entry.licence)]
        title = f"{entry.name}, {size}: {', '.join(entry.splits)}"
        terminal.print_facts(title, [*rows, ("sha256", ", ".join(digests))])
    terminal.write("next: penstock fetch NAME")
