"""Token arrays on disk.

Takes documents and a tokenizer, gives a directory of plain `.npy` files under one
manifest. Promises that its bytes depend on inputs and settings alone, that a build
killed at any moment goes on where it stopped, and that whatever was damaged since is
found by `verify`. docs/store-format.md is the specification.
"""
