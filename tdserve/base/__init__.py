"""What every floor builds on: errors, ids, settings, addresses, deadlines. No torch, no stores, no messages."""
