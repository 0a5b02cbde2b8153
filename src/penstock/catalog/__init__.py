"""Public datasets by name.

Takes the name of an entry, gives its files in a directory: whole, checked against the
size and SHA-256 that the entry records, in the layout that `penstock build` reads.
Promises: a file appears under its name only when it is complete; a good file is never
requested or overwritten again; a download that was cut or killed goes on where it stopped.
"""
