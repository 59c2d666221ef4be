"""Which form of a linear layer runs for how many rows, and with which tile: by measurements, or where there are none by a rule.

What lies between two linear layers of a decoder (a norm, an activation, a residual) is fused into one of the two. So each layer
has several forms, and each form is the fastest for some numbers of rows T, some shapes [N, K] and some cards:

    few     ``skinny_linear``: norms inside the products that follow them, residuals inside those before
    meet    ``mid_linear``'s ``mid_add``: products start early and leave sums of squares instead of a norm
    parts   ``mid_linear``'s ``linear_parts``: products start early, a norm sums their parts
    wide    ``wide_linear``: epilogues inside the products of many tokens
    plain   ``F.linear`` and separate kernels, on every device

``card``: what a rule asks of a GPU. ``cost``: predicted times. ``table``: measured times and tiles, shipped and of the user.
``tune``: measures them.
"""
