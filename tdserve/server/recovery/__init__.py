"""What outlives a crash: on record while it is under way, then repaired, or kept until its writer is proved gone."""
