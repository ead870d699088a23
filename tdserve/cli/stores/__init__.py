"""Commands about stores as a whole. They read no rows, so they need no torch.

Read ``ls`` first; then ``info``, ``keys`` and ``version_list`` (``tdserve versions``), and ``rm``, which deletes.
"""
