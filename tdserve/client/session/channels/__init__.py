"""What a session exchanges with its server: the message that opens it (``hello``), requests and answers
(``client_control_channel``), content (``content_channel``), and events of groups (``group_inbox``); and the address at
which the client itself is reached (``network_interface``).
"""
