"""Stores as datasets: for the workers of a DataLoader, and as epochs divided among readers."""
