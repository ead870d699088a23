"""The rules of keyed stores: settings, then what a change of entries does.

Read ``keyed_settings`` first, then ``entry_changes``; ``keyed_state`` is what control keeps of an open store.
"""
