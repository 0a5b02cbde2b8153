"""Files in object storage and on web servers.

`open_objects` takes a URL and returns the files below it: to read, download, write and delete. Each
call ends within a deadline, with all its retries. No user, password, query or key of a URL is in a
message, a log or a repr.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.remote.objects import Objects as Objects
    from penstock.remote.objects import open_objects as open_objects
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, {"objects": "Objects open_objects"})
