"""The observer's pages for people: readable without scripts; nothing of a store is markup.

Read ``page_routes`` first; then ``page_figures``, ``row_preview`` and ``guide_pages``.
"""
