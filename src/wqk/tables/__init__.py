"""Score tables: their columns, how they are shown, and the files they are kept in."""
