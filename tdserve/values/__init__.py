"""Non-tensor values as bytes, and back; several of them as columns, and those of a row as a bundle."""
