"""The observer's pages for people: readable without scripts; nothing of a store is markup."""
