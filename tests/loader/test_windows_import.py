"""The loader can be imported where Windows lacks modules and functions that Unix has."""

import subprocess
import sys

# Modules and functions that penstock could use and that Python on Windows does not have.
PREPARE = """
import importlib.abc, mmap, os, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ImportError(f"No module named {name!r}")

import filelock  # on Windows it has other code, which cannot be imported here
sys.modules.pop("fcntl", None)
sys.modules.pop("resource", None)
sys.meta_path.insert(0, Missing())
import numpy, torch  # which have versions for Windows that need none of these
sys.platform, os.name = "win32", "nt"
for name in ("register_at_fork", "fork", "sysconf", "posix_fadvise", "getpriority", "pread"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("MADV_WILLNEED", "MADV_RANDOM"):
    if hasattr(mmap, name):
        delattr(mmap, name)
"""


def test_the_loader_imports_without_what_windows_lacks():
    code = PREPARE + "import penstock.loader\nfrom penstock.loader import Loader\nprint(Loader)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "Loader" in done.stdout
