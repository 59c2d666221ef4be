"""Floor 4: architectures over layers, their configuration and the loading of their weights."""
