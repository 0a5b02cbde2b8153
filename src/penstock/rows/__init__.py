"""A store as rows that can be read in any order.

Takes stores or bare token files, gives objects with a length, a digest and a `read` that
turns many sample numbers into arrays at once. Promises that a sample is always the same
row, and that what does not fit into rows is counted to the token.
"""
