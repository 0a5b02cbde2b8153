"""Documents to token ids.

Takes batches of documents, gives flat arrays of ids with an offset for each document.
Promises that ids equal those of the reference implementation (the first documents of
every build are compared), that text which spells a special token stays text unless
asked otherwise, and that no id is ever cut to fit.
"""
