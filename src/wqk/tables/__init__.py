"""Score tables: columns, display and files."""
