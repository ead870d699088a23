"""What outlives a crash: on record while it is under way, then repaired; and the proof that a writer is gone."""
