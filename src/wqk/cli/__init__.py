"""The command: one file for each verb, each a thin layer over the library."""
