"""Floor 1: streams, events, staging and readback, for CUDA and for plain CPUs behind one small interface."""
