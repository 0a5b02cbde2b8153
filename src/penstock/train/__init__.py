"""The reference trainer: from rows to a loss curve.

    recipe ── rows, plan, loader ── model ── run ──► checkpoints, metrics.jsonl, curve.svg

Small enough to read in one sitting, and made to be copied from: `model` is the GPT-2
family, `run` the loop. Both need NumPy and torch alone.
"""
