"""Sources of bytes: files on disk, the Hub, web servers and buckets. See README.md here."""
