"""Stores as datasets: for the workers of a DataLoader, and as epochs divided among readers.

Read ``dataset`` first; then ``epoch_batches`` (a reader's share of an epoch). ``worker_pool`` is the memory of a
DataLoader's worker.
"""
