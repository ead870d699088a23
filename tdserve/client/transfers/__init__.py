"""Content between a client and its server: uploads and downloads, reads and writes of one call each."""
