"""Integers to integers: which sample lies at which position of a run.

Takes sizes, weights, a seed and positions; gives sources, epochs and samples, and
the way back. Everything is a pure function of its arguments, the same on every
machine and version of NumPy, in constant memory: no files, no torch, no state.
`permute` shuffles, `mix` interleaves, `schedule` changes weights, `passes` reads
everything once an epoch, `shuffle` names the modes, `steps` and `shard` deal
positions to ranks, and `plan` composes them.
"""
