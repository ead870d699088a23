"""Who may do what: roles of tokens, what each request needs, and the file of tokens. No I/O and no clock.

``roles`` has what each request needs, ``grants`` what a token grants, ``token_entries`` the file of tokens.
"""
