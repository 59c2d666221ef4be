"""Pictures among texts: requests a second, first tokens, and the pace of rows that decode beside arriving pictures.

    python -m bench.sight FOLDER --side 896 --requests 64 --decoding 64

FOLDER: config.json of a model with sight (weights are dummies). Pictures are noise, so none is found in a cache. Prints JSON.
``--transformers 16`` measures transformers on the same pictures afterwards, in batches of 16.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import media_peer
from headway.cli.bench.anchors.context import free_memory
from headway.core.config import EngineArgs
from headway.core.media import VisionInfo
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.multimodal.items import find_runs, make_item

SCALE, SHIFT = np.full(3, 1 / 127.5, np.float32), np.full(3, -1.0, np.float32)


def pictured(core: EngineCore, number: int, side: int, tokens: int) -> AddRequest:
    """A request with one picture of ``side`` pixels (or of the model's one size) and 32 tokens of text."""
    info = core.info.vision
    assert info is not None, "a model without sight"
    item = make_item(info, noise(number, side_of(info, side))[None], SCALE, SHIFT)
    ids = prompt_of(info, item.rows)
    return request(f"picture-{number}", ids, tokens, media=[item], runs=find_runs(info, ids, [item]))


def side_of(info: VisionInfo, side: int) -> int:
    """The side that the model takes in place of ``side`` pixels."""
    step = info.patch * info.group
    return info.one_size or max(side // step, 1) * step


def noise(number: int, side: int) -> npt.NDArray[np.uint8]:
    """The picture of that number, [side, side, 3]."""
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)


def prompt_of(info: VisionInfo, rows: int) -> list[int]:
    """32 tokens of text around a picture of so many rows."""
    return [5] * 8 + [info.token] * rows + [7] * 24


def request(name: str, ids: list[int], tokens: int, **more: Any) -> AddRequest:
    """A greedy request of exactly so many tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return AddRequest(request_id=name, prompt_token_ids=ids, params=params, seed=0, eos_token_ids=[], **more)


def run(core: EngineCore, waiting: list[AddRequest], every: float = 0.0) -> dict[str, list[float]]:
    """Times of each request's tokens, its arrival first; one request is added every so many seconds (0: all at once)."""
    times: dict[str, list[float]] = {}
    begun = time.perf_counter()
    left = list(waiting)
    while left or core.has_work():
        now = time.perf_counter()
        while left and now - begun >= every * (len(waiting) - len(left)):
            times[left[0].request_id] = [time.perf_counter()]
            core.add(left.pop(0))
        for update in core.step():
            times[update.request_id] += [time.perf_counter()] * len(update.new_token_ids)
    return times


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--side", type=int, default=896)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--decoding", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1500, help="of each text that decodes")
    parser.add_argument("--ratio", type=float, default=0.75, help="encoder_step_ratio")
    parser.add_argument("--transformers", type=int, default=0, metavar="BATCH", help="measure it, too, in such batches")
    options = parser.parse_args()
    import torch

    args = EngineArgs(
        model=options.folder,
        load_format="dummy",
        max_model_len=options.max_model_len,
        skip_tokenizer_init=True,
        encoder_step_ratio=options.ratio,
        count_host_waits=torch.cuda.is_available(),
    )
    core = build_engine(args)
    run(core, [pictured(core, 5000 + number, options.side, 4) for number in range(4)])
    found: dict[str, Any] = {}
    start = time.perf_counter()
    times = run(core, [pictured(core, number, options.side, 64) for number in range(options.requests)])
    found["requests_per_second"] = options.requests / (time.perf_counter() - start)
    single = [run(core, [pictured(core, 1000 + number, options.side, 2)]) for number in range(8)]
    found["first_token_ms"] = median(1e3 * (each[1] - each[0]) for one in single for each in one.values())
    texts = [request(f"text-{number}", [9 + number] * 64, options.tokens) for number in range(options.decoding)]
    found["text_alone"] = gaps(run(core, texts))
    texts = [request(f"again-{number}", [9 + number] * 64, options.tokens) for number in range(options.decoding)]
    for each in texts:
        core.add(each)
    images = [pictured(core, 2000 + number, options.side, 8) for number in range(32)]
    times = run_beside(core, [each.request_id for each in texts], images, 0.1)
    found["text_beside_pictures"] = gaps({name: each for name, each in times.items() if name.startswith("again")})
    firsts = [1e3 * (each[1] - each[0]) for name, each in times.items() if name.startswith("picture")]
    found["first_token_beside_text_ms"] = median(firsts)
    stats = core.stats()
    found["graph_steps"], found["steps"] = stats.num_graph_steps, stats.num_steps
    found["host_waits"] = core.stats().host_waits
    info, rows = core.info.vision, pictured(core, 0, options.side, 1).media[0].rows
    core.shutdown()
    del core
    if options.transformers and info is not None:
        free_memory()
        side, count = side_of(info, options.side), options.requests
        found["transformers"] = media_peer.sight(
            options.folder, lambda number: noise(number, side), prompt_of(info, rows), count, options.transformers, 64
        )
    print(json.dumps(found, indent=1))


def run_beside(
    core: EngineCore, open_names: list[str], waiting: list[AddRequest], every: float
) -> dict[str, list[float]]:
    """``run``, with requests that have been added already."""
    times: dict[str, list[float]] = {name: [time.perf_counter()] for name in open_names}
    begun, left = time.perf_counter(), list(waiting)
    while left or core.has_work():
        if left and time.perf_counter() - begun >= every * (len(waiting) - len(left)):
            times[left[0].request_id] = [time.perf_counter()]
            core.add(left.pop(0))
        for update in core.step():
            times[update.request_id] += [time.perf_counter()] * len(update.new_token_ids)
    return times


def gaps(times: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds between a request's tokens, over all requests: the median, and what one in a hundred exceeds."""
    apart = [1e3 * (b - a) for each in times.values() for a, b in pairwise(each[1:])]
    return {"p50_ms": median(apart), "p99_ms": quantiles(apart, n=100)[98]}


if __name__ == "__main__":
    main()
