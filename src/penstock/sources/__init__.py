"""Raw files to documents.

Takes paths, globs, directories, URLs or lists of texts. Gives batches of documents,
each with the file and offset it came from. Promises that every byte of the
decompressed input ends in a document, a separator, a skipped blank or a logged
reject, and that how the input is cut into slices depends on the input alone.
"""
