"""From a structure, tensors and values to a tensordict or tensorclass; the reverse of ``captures``.

Read ``build`` first; then ``assembly``, of elements, with ``gathering`` (by their notes) and ``deferred`` (when first
read). ``packing`` is the stored form of one element, ``array_views`` makes dicts of arrays, and ``replace_content``
fills a tensordict that is there.
"""
