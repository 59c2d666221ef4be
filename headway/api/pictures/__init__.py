"""Pictures at the door: where they come from, how they are prepared, and what becomes of the prompt."""
