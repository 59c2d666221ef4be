"""Native CPU kernels: C compiled on first use with the machine's compiler, called through ctypes.

``ops``, ``step_ops`` and ``sampling_ops`` have one function per operation; ``loader`` builds and loads the library;
``csrc`` holds the C. Without a compiler, or with HEADWAY_NATIVE=0, nothing is built and the torch references serve.
"""
