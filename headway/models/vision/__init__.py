"""Towers that turn pictures into rows of a decoder's input: what they are (``spec``), the module (``tower``), and how
families write them in config.json (``families``)."""
