"""Token files of other tools: read in place, import and export.

`open_tokens` recognises the files of llm.c, modded-nanogpt, Megatron-LM, datatrove, NumPy, MosaicML
Streaming, LitData and Hugging Face datasets by their contents, and opens those of nanoGPT and OLMo
if the caller names them. The ids are mapped into memory; those of Parquet and of compressed files
are decoded into the cache once. `Windows`, `Packs` and `Documents` take the result like a store.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.formats.open import open_tokens as open_tokens
    from penstock.formats.token_files import TokenFiles as TokenFiles
    from penstock.formats.token_files import verify_tokens as verify_tokens
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"open": "open_tokens", "token_files": "TokenFiles verify_tokens"}
    )
