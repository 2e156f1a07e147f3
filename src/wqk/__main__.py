"""The entry point of the command, which handles all remaining errors.

Exit status 1 is a negative result of some verbs (`same`: the models differ). Python also exits with
1 after an uncaught exception, for example an exception during an error report, or before the
command is imported. Here every failure exits with status 2 and one line. This code imports nothing,
because memory or file descriptors may be exhausted.
"""

import atexit
import contextlib
import os
import sys
from typing import NoReturn

FAILED = 2


def main() -> None:
    """Run the ``wqk`` command, and end the process with its exit status."""
    status = status_of_command()
    if "obstore" in sys.modules:
        leave_at_once(status)
    sys.exit(status)


def status_of_command() -> int:
    """Run the ``wqk`` command and return its exit status."""
    try:
        from wqk.cli.main import command, run

        return run(command)
    except SystemExit:
        raise
    except BaseException as error:
        report(error)
        return FAILED


def leave_at_once(status: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    Threads of obstore may still release Python objects. During the interpreter's shutdown, this
    would abort the process with status 134, instead of the command's status.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def report(error: BaseException) -> None:
    """Write one line about an error to standard error, with very little memory."""
    if isinstance(error, MemoryError):
        reason = b"out of memory: give the process more memory"
    elif getattr(error, "errno", None) in (23, 24):  # ENFILE and EMFILE
        reason = b"too many open files: let the process open more (ulimit -n)"
    else:
        reason = b"internal failure, " + type(error).__name__.encode("ascii", "replace")
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, b"wqk: " + reason + b"\n")


if __name__ == "__main__":
    main()
