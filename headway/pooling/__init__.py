"""Floor 3: from hidden states to a vector for each text."""
