"""Sources of bytes: files on disk, the Hub, and files behind HTTP."""
