"""The layers architectures are made of. Each names the checkpoint tensors that fill it (``destinations``)."""
