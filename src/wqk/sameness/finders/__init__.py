"""Finders: each recognizes one cause of a wrong weight, and returns the edit for the repair.

`wqk.sameness.finders.all_finders` lists all finders, in the order in which they are tried.
"""
