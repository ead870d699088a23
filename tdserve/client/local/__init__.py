"""The local end of a client on the server's own machine: it maps the files and copies the content."""
