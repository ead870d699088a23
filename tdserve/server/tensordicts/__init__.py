"""What a store holds: rows that are there are read and written, whole or not at all; keys come and go."""
