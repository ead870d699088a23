"""Who is served: tokens, and the limits of each.

Read ``gate`` first, which every call passes. ``token_register`` has the tokens that count now, ``token_usage`` what
each uses, ``unary_calls`` those under way.
"""
