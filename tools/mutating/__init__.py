"""A tool that plants faults, one at a time, and counts those that the tests notice."""
