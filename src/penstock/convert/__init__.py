"""Tokens from one format to another: `import_tokens` and `export_tokens`.

An import makes a store of the token files of another tool: verified, and resumable after a kill.
An export writes the tokens of a store, or of any token files, in the format of another tool. The
packages of those tools are not needed.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.convert.export import export_tokens as export_tokens
    from penstock.convert.imports import import_tokens as import_tokens
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"export": "export_tokens", "imports": "import_tokens"}
    )
