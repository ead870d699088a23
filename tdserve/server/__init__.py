"""The control process: the only owner of every decision. It never touches tensor content, and never imports torch.

Its packages import one another downwards: ``access`` and ``recovery`` are below ``sessions``, which is below ``kinds``,
which is below ``tables``, ``kv`` and ``weights``, which are below ``tensordicts``, ``moves`` and ``checking``, which
are below ``movers``. Modules that use all of them, or that all of them use, are here.
"""
