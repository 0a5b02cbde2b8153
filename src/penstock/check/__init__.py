"""The user's own files, looked at before a training run.

Takes names of files and how they would be read, gives six findings with their figures.
Promises: nothing is written but to a temporary directory, and the time is bounded by the
size of the sample, not of the files.
"""
