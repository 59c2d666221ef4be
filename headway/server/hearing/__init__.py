"""Routes of models that hear: transcriptions and translations of uploaded recordings."""
