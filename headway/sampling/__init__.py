"""Floor 3: logits to tokens. Each feature is a class with the same verbs: ``tables``, ``stage``, ``apply``."""
