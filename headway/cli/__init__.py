"""Floor 10: the ``headway`` command. Everything slow is imported inside the commands, so that ``--help`` is quick."""
