"""Stores as datasets: a DataLoader's workers, and epochs divided among readers."""
