"""The control process: the only owner of every decision. It never touches tensor content, and never imports torch.

Its packages import one another downwards: ``recovery`` is below ``sessions``, which is below ``tables``, and that is
below ``tensordicts`` and ``weights``. Modules that use all of them, or that all of them use, are here.
"""
