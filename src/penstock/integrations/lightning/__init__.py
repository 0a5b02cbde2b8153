"""LightningDataModules over text, whose runs resume at exactly the next batch.

`LLMDataModule` pads or packs rows of text for models of `transformers`.
`LocalOpenWebTextDataModule` cuts large local files into windows. Both need `penstock[lightning]`.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.integrations.lightning.__main__ import debug_datamodule as debug_datamodule
    from penstock.integrations.lightning.datamodules import LLMDataModule as LLMDataModule
    from penstock.integrations.lightning.datamodules import (
        LocalOpenWebTextDataModule as LocalOpenWebTextDataModule,
    )
    from penstock.integrations.lightning.fingerprints import (
        FingerprintCallback as FingerprintCallback,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "datamodules": "LLMDataModule LocalOpenWebTextDataModule",
            "fingerprints": "FingerprintCallback",
            "__main__": "debug_datamodule",
        },
    )
