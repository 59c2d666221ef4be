"""The pretended CUDA device of ``headway syncs --simulate``: a backend of torch's own kind whose values lie on the CPU."""
