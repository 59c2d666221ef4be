"""Ranks: who they are, how they speak with each other, what each has of the model."""
