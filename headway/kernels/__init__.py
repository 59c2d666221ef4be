"""Floor 1: operations on the device. One folder per operation: schema and shape doc, torch reference, Triton kernel."""
