"""Finders: each looks for one cause of a weight that is not as expected, and for its edit.

`wqk.sameness.finders.all_finders` lists all finders, in the order in which they are tried.
"""
