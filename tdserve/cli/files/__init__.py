"""Commands between files and stores.

Read ``put`` and ``get`` first; ``import_rows`` (``tdserve import``) reads files of other libraries, ``adopt`` serves
a folder where it is.
"""
