"""Floor 3: pictures. Host side: image files to patches and integers (``images``, ``process``, ``layout``). Device side: the
encoder cache's rows become inputs of a decoder (``place``)."""
