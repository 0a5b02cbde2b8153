"""Rows to rows, changed by chance that can be repeated.

Takes rows and a key for each, gives new rows: tokens masked, documents rearranged, tokens
dropped. A row's key comes from (seed, rows, epoch, sample), which a position of a plan
decides; so a row is changed anew in every epoch, and always in the same way at the same
position: at any world size, batch size and number of threads. NumPy only, no random state.
"""
