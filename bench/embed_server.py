"""An embedding server under 256 clients, beside the same engine offline, and beside peers: one command, one table.

    python -m bench.embed_server [MODEL] [--dummy] [--lengths 32 128 510] [--texts 4096] [--clients 256] [--batch 1 32]
                                 [--peers transformers sentence-transformers] [--json FILE] [-- options of headway serve]

``headway serve`` runs as a process of its own; the client shares the machine with it (``client busy`` says how much of
one core it takes). Prompts are token ids, in one request ``batch`` of them. Offline is ``LLM.embed`` in a process of its
own. Peers run offline: texts sorted by length, batches of 256, padded, mean over the tokens, length 1, on the GPU in
bfloat16 where there is one.
On the card: ``python -m bench.embed_server --dummy`` (BERT-base's shape), or with a model's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from headway.cli.bench.anchors import server
from headway.cli.bench.embed import _clients
from headway.cli.http_client import HttpClient
from headway.cli.http_wire import Address
from headway.weights.source import locate

BERT = Path(__file__).parents[1] / "headway" / "cli" / "bench" / "anchors" / "models" / "bert_base"
PEER_BATCH = 256
Row = dict[str, Any]


def prompts(length: int, count: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, none of them special in common vocabularies."""
    rng = random.Random(length)
    return [[rng.randrange(vocabulary // 20, vocabulary) for _ in range(length)] for _ in range(count)]


def offline(model: str, given: argparse.Namespace, options: list[str]) -> dict[int, float]:
    """Texts a second of ``LLM.embed`` by length, in a process of its own."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        lengths = [word for length in given.lengths for word in ("--input-len", str(length))]
        command = [
            sys.executable,
            "-m",
            "headway",
            "bench",
            "embed",
            "--model",
            model,
            "--num-prompts",
            str(given.texts),
        ]
        command += [*lengths, "--output-json", str(out), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return {row["input_len"]: row["requests_per_second"] for row in json.loads(out.read_text())}


async def online(port: int, given: argparse.Namespace, vocabulary: int) -> list[Row]:
    """A row for each length and batch."""
    address, rows = Address("127.0.0.1", port), []
    client = HttpClient(address)
    try:
        for length in given.lengths:
            texts = prompts(length, given.texts, vocabulary)
            for batch in given.batch:
                bodies = [json.dumps({"input": texts[i : i + batch]}).encode() for i in range(0, len(texts), batch)]
                requests = [address.request("POST", "/v1/embeddings", client.headers, body) for body in bodies]
                await _clients(client, requests[: 2 * given.clients], given.clients)
                start, work = time.perf_counter(), time.process_time()
                latencies = await _clients(client, requests, given.clients)
                seconds, busy = time.perf_counter() - start, time.process_time() - work
                p50, p99 = (float(np.percentile(latencies, percent)) * 1e3 for percent in (50, 99))
                rows.append(
                    {"length": length, "batch": batch, "requests_s": len(requests) / seconds,
                     "texts_s": len(texts) / seconds, "p50_ms": p50, "p99_ms": p99, "client_busy": busy / seconds}
                )  # fmt: skip
    finally:
        await client.close()
    return rows


def peer(name: str, model: str, given: argparse.Namespace, vocabulary: int) -> dict[int, float] | str:
    """Texts a second of a peer by length, or why there are none."""
    cuda = torch.cuda.is_available()
    where, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    try:
        if name == "sentence-transformers":
            from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

            module = SentenceTransformer(model, device=where)[0].auto_model.to(dtype)
        else:
            from transformers import AutoConfig, AutoModel

            if given.dummy:
                module = AutoModel.from_config(AutoConfig.from_pretrained(model)).to(where, dtype).eval()
            else:
                module = AutoModel.from_pretrained(model, dtype=dtype).to(where).eval()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]

    @torch.inference_mode()
    def encode(texts: list[list[int]]) -> Any:
        found = []
        for start in range(0, len(texts), PEER_BATCH):
            ids = torch.tensor(texts[start : start + PEER_BATCH]).to(where)  # of equal length: nothing is padded
            states = module(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            found.append(torch.nn.functional.normalize(states.float().mean(1), dim=-1).cpu())
        return torch.cat(found)

    rates = {}
    for length in given.lengths:
        texts = prompts(length, given.texts, vocabulary)
        encode(texts[:PEER_BATCH])
        start = time.perf_counter()
        encode(texts)
        rates[length] = len(texts) / (time.perf_counter() - start)
    return rates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(BERT))
    parser.add_argument("--dummy", action="store_true", help="random weights, for a folder with a config.json alone")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 510])
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--peers", nargs="*", default=["transformers"])
    parser.add_argument("--json", type=Path)
    mine, options = (sys.argv[1:], []) if "--" not in sys.argv else (None, sys.argv[sys.argv.index("--") + 1 :])
    given = parser.parse_args(mine if mine is not None else sys.argv[1 : sys.argv.index("--")])
    folder = str(locate(given.model, load_format="dummy" if given.dummy else "auto").path)
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    engine = [*options, "--skip-tokenizer-init", *(["--load-format", "dummy"] if given.dummy else [])]
    alone = offline(given.model, given, engine)
    port = server.free_port()
    with TemporaryDirectory() as logs:
        log = Path(logs) / "server.log"
        command = [sys.executable, "-m", "headway", "serve", given.model, "--port", str(port), *engine]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
            try:
                asyncio.run(server._until_healthy(process, port, log))  # noqa: SLF001
                rows = asyncio.run(online(port, given, vocabulary))
            finally:
                server.stop(process)
    peers = {name: peer(name, folder, given, vocabulary) for name in given.peers}
    print(
        f"| tokens | texts a request | requests/s | texts/s | p50 ms | p99 ms | client busy | offline |{' | '.join(peers)} |"
    )
    print("|---" * (8 + len(peers)) + "|")
    for row in rows:
        beside = [found[row["length"]] if isinstance(found, dict) else 0.0 for found in peers.values()]
        print(
            f"| {row['length']} | {row['batch']} | {row['requests_s']:,.0f} | {row['texts_s']:,.0f} | {row['p50_ms']:.1f} "
            f"| {row['p99_ms']:.1f} | {row['client_busy']:.0%} | {alone[row['length']]:,.0f} | "
            + " | ".join(f"{rate:,.0f}" if rate else "-" for rate in beside)
            + " |"
        )
    for name, found in peers.items():
        if isinstance(found, str):
            print(f"{name}: {found}")
    if given.json:
        given.json.write_text(json.dumps({"server": rows, "offline": alone, "peers": peers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
