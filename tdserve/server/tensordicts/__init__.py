"""Content of existing stores: rows are read and written, whole or not at all; keys are added, renamed and removed."""
