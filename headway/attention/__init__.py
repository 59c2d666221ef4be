"""Floor 3: attention over the paged KV cache. Reads a ``StepBatch``, calls kernels, knows no model."""
