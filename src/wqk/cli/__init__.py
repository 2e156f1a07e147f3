"""The command: one file for each verb, each a thin layer over the library."""

from wqk.cli.main import main

__all__ = ["main"]
