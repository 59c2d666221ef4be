"""Routes of models that pool: OpenAI's embeddings, vLLM's /pooling, /classify, /score and /rerank, and TEI's."""
