"""Limits of the process that are too small for any verb, found before a library is imported.

While libraries start, they do not raise an error if address space or file descriptors run out.
OpenBLAS ends the process with status 1, the status of a negative result of `same`; polars aborts
the process. Both libraries allocate memory for each core.
"""

from __future__ import annotations

import os

# Address space that the libraries need to start, and for each core. With less, polars or OpenBLAS
# ended the scan of a model of 1 MB on two cores.
SMALLEST_SPACE = 384 * 2**20
SPACE_OF_A_CORE = 256 * 2**20

# Open files that the libraries need to start.
FEWEST_FILES = 16


def too_small() -> str | None:
    """Return a sentence about the first limit that is too small; None if all limits suffice."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = SMALLEST_SPACE + SPACE_OF_A_CORE * cores()
    if space != resource.RLIM_INFINITY and space < needed:
        return (
            f"out of memory: the process may use {space // 2**20} MB of address space, and its "
            f"libraries need {needed // 2**20} MB to start on {cores()} cores; raise the limit "
            "(ulimit -v)"
        )
    if files != resource.RLIM_INFINITY and files < FEWEST_FILES:
        return (
            f"the process may open {files} files, and needs {FEWEST_FILES}; raise the limit "
            "(ulimit -n)"
        )
    return None


def cores() -> int:
    """Return the number of cores for which libraries start threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
