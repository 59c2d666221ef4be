"""Requests that pool: texts to token ids in bulk, the door for them, vectors to outputs, scores of pairs."""
