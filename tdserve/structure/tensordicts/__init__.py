"""What tensordicts and tensorclasses hold besides tensors: entries, state, class, and values that are read anew.

Read ``entries`` and ``instances`` first; then ``state`` (locks, parameters), ``live_values``, ``views`` and
``module_state``. ``compact`` puts tensordicts over one storage, for a queue between processes.
"""
