"""The control process: the one owner of every decision. It never touches tensor content, and never imports torch.

Its rooms import one another downwards: ``recovery`` lies below ``sessions``, these below ``tables``, and those below
``tensordicts`` and ``weights``. What knows of all of them, or is known to all, lies here.
"""
