"""The rules of keyed stores: settings, then what a change of entries does."""
