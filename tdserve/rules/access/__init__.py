"""Who may do what: roles of tokens, what each request needs, and the file of tokens. No I/O and no clock."""
