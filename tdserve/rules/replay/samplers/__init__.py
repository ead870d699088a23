"""Samplers: the settings by which the rows of a sample are chosen, and the objects that draw by them.

Read ``sampler`` and ``selector`` first: a setting, and the object that draws by it. ``prioritized`` is a good example;
``order``, ``priority_order``, ``without_replacement`` and ``slices`` (with ``trajectories``) are others, ``epochs`` is
the order of a dataset.
"""
