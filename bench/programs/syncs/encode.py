"""sentence-transformers' encode on a small BERT with random weights. python encode.py DEVICE RESULT.json [TIMES]"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel, BertTokenizerFast

TEXT = "the host never waits for its device and runs ahead of it while a queue of work keeps every card busy"
WORDS = TEXT.split()


def main(device: str, told: Path) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]))
        config = BertConfig(
            vocab_size=64, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
        )
        BertModel(config).save_pretrained(folder)
        BertTokenizerFast(vocab_file=str(vocabulary)).save_pretrained(folder)
        words = models.Transformer(folder, max_seq_length=32)
        pooling = models.Pooling(128, pooling_mode="mean")
        model = SentenceTransformer(modules=[words, pooling, models.Normalize()], device=device)
    begin, worked = time.perf_counter(), time.process_time()
    sentences = [" ".join(WORDS[i % 7 : i % 7 + 3 + i % 11]) for i in range(64)]
    vectors = model.encode(sentences, batch_size=16, normalize_embeddings=True)
    likeness = model.similarity(vectors, vectors)
    seconds, processor = time.perf_counter() - begin, time.process_time() - worked
    result = [round(float(x), 3) for x in [*vectors[:3, :4].ravel(), likeness[0, 5]]]
    told.write_text(
        json.dumps({"seconds": seconds, "processor": processor, "torch": torch.__version__, "result": result})
    )


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 1):  # the last one's time is told
        main(sys.argv[1], Path(sys.argv[2]))
