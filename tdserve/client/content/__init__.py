"""Content as a client holds it: tensors in the order in which they are sent, values, padding, devices.

``leaves`` and ``value_blocks`` are what is sent: tensors and values. ``received`` and ``read_content`` are what comes,
``padding`` and ``ragged_values`` the forms of ragged leaves. ``row_choice`` chooses rows of what a caller gives.
``devices`` and ``gpu`` are about GPUs, ``fake_modes`` and ``outer_modes`` about the modes of torch.
"""
