"""A store that is read while it is written.

    inputs ── build, in a background thread ──► part 0 │ part 1 │ part 2 │ …
                                                  └── rows, order, loader ──► batches

A part can be read as soon as it is sealed, so training begins after the first of them and
not after the last. What is read, and in which order, is what the finished store would give.
"""
