"""Floor 7: the host loop, and the clients that reach it (same thread, a thread of its own, a process of its own)."""
