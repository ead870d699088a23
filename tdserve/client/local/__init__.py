"""What a client on the server's own machine does for itself: it maps the files and moves the bytes."""
