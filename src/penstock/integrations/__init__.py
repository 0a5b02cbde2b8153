"""Drop-in PyTorch, Lightning and Hugging Face data classes over penstock stores.

Each integration sets the defaults and names of the code that it replaces. Its batches come from
the stores, rows and orders of the rest of penstock. Nothing below imports this package, and each
integration imports only the packages that it is for: import from `penstock.integrations.pytorch`,
`.lightning`, `.huggingface`, `.multiplex` or `.sft`.
"""
