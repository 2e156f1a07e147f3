"""Score tables: their columns, their display, and their files."""
