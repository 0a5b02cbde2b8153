"""Positions to batches.

Takes a plan (or rows) and gives tensors, on the CPU or on a GPU. Promises that its state
is one position, the same on every rank; that resuming anywhere, on any number of ranks,
gives the very rows that would have come; and that a batch handed out is never changed.
"""
