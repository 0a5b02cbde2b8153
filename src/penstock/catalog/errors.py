"""The error of a download that cannot be finished."""

from penstock.errors import SourceError

__all__ = ["FetchError"]


class FetchError(SourceError, OSError):
    """A file that could not be fetched, or is not the one that was meant."""
