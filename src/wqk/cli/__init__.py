"""The command: one file for each verb, a thin layer over the library."""
