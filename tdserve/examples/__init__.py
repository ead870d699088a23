"""Programs to copy from. They use what ``import tdserve`` offers, and nothing else of the package but its errors."""
