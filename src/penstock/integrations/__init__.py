"""Drop-in PyTorch, Lightning and Hugging Face data classes over penstock stores.

Each integration has the names and defaults of the code that it replaces. Its batches come from
the stores, rows and orders of the rest of penstock, which do not import this package. Import from
`penstock.integrations.pytorch`, `.lightning`, `.huggingface`, `.multiplex` or `.sft`: each
imports only the packages that it is for.
"""
