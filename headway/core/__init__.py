"""Floor 0: the words every other floor shares. Standard library, numpy and msgspec only."""
