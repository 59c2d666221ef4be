"""Floor 2: what lives on the device: slot tables, the packed step, the batch a forward pass sees, the KV pool."""
