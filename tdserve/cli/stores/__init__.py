"""Commands about stores as a whole. They read no rows; ``ls``, ``info`` and ``versions`` need no torch.

Read ``ls`` first; then ``info``, ``keys`` and ``version_list`` (``tdserve versions``), and ``rm``, which deletes.
"""
