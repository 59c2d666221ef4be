"""Floor 9: OpenAI's HTTP interface over ``AsyncLLM``. ``headway.server.app:build_app`` makes it, ``launch`` runs it."""
