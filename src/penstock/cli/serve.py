"""`penstock serve`: the page of `penstock report`, in a browser on this machine."""

from typing import Annotated

from penstock.cli.options import option
from penstock.cli.report import AnySource, TokenizerName, opened_subject
from penstock.cli.terminal import write
from penstock.cli.token_files import TokenColumn, TokenDtype, TokenFormat, TokenOptions, VocabSize
from penstock.cli.train import Settings


def serve_command(
    source: AnySource,
    port: Annotated[int, option("The port. 0: any free port.", "NUMBER", least=0)] = 0,
    settings: Settings = None,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerName = None,
) -> None:
    """Show a page about a store, a recipe or a run in a browser on this machine.

    It is the page of penstock report, and shows every step and every document.
    Only this machine can open it. Ctrl-C ends the server.

    penstock serve runs/mine
    """
    from penstock.report.server import ReportServer

    given = TokenOptions(format, dtype, vocab_size, tokenizer, column)
    server = ReportServer(
        source, lambda: opened_subject(source, settings, given, as_json=False), port=port
    )
    try:
        with server:
            write(f"open {server.url} in a browser; Ctrl-C ends the server")
            server.wait()
    except KeyboardInterrupt:
        write("the server has ended")
