"""Index expressions as data.

Read ``selection`` first, with its ``items``; ``torch_selection`` applies it to tensors, ``dimension_names`` names the
dimensions of the result.
"""
