"""Recovery after a crash: records of what is under way, its repair, and the proof that a writer is gone."""
