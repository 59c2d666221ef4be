"""Floor 8: what users import. Text in, text out; the only floor that knows tokenizers."""
