"""Run `python -m penstock.integrations.lightning`."""

import sys

from penstock.integrations.lightning.debug import main

sys.exit(main())
