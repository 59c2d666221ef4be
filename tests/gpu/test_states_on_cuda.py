"""Models with states on a card. Mamba-2 in bfloat16: decode steps in each form of their products, which start early beside
kernels of states, give what separate kernels give. Whole engines in float32: the CPU's tokens, with graphs and without a wait.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.models.layers.forms import Rules
from tests.attention.test_kinds import NGRAM
from tests.engine.harness import request, run
from tests.gpu.guard import no_waits
from tests.models.harness import Machine, Row
from tests.models.tiny import ours
from tests.recurrent.test_engine import arguments
from tests.recurrent.test_prefixes import OFTEN, conversation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
ROWS = [1, 2, 4, 16, 33]
"""Forms for few tokens, and products that start early."""


@pytest.mark.parametrize("groups", [1, 4])
def test_forms_of_decode_steps(groups: int) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=509, hidden_size=256, num_heads=8, head_dim=64, state_size=128, n_groups=groups, num_hidden_layers=4,
        chunk_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    oracle = transformers.Mamba2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 509, (ROWS[-1], 12), generator=generator).tolist()
    plain, fused = (Machine(ours(oracle, dtype=torch.bfloat16), num_slots=ROWS[-1] + 1) for _ in range(2))
    plain.model.use_forms(Rules())
    at = [6] * ROWS[-1]
    for machine in (plain, fused):
        for slot, prompt in enumerate(tokens):
            machine.step([Row(slot, prompt[:6])])
    for place, rows in enumerate([*ROWS, 2]):
        step = [Row(slot, tokens[slot][at[slot] :][:1], at[slot]) for slot in range(rows)]
        at = [position + (slot < rows) for slot, position in enumerate(at)]
        wanted, found = (machine.step(step, pad_rows=1, pad_tokens=1) for machine in (plain, fused))
        for mine, theirs in zip(found, wanted, strict=True):
            assert float((mine - theirs).abs().max()) <= 0.04 * float(theirs.abs().max()), f"step {place}, {rows} rows"


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon-h1", "qwen3-next", "lfm2", "minimax"])
def test_engines_agree_with_the_cpu(name: str, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens at depth 2, in chunks, behind checkpoints that the first round leaves and, with drafts, from rings."""
    asked = [
        request(each.request_id, each.prompt_token_ids, temperature=0.0, max_tokens=12, ignore_eos=True)
        for each in conversation()
    ]
    more = {"speculative_config": NGRAM} if drafts else {}
    found = []
    for device, depth, guard in (("cpu", 0, nullcontext()), ("cuda", 2, no_waits(monkeypatch))):
        changes = arguments(name, device=device, run_ahead=depth, enable_prefix_caching=True, **more)
        core = build_engine(EngineArgs(**changes), progress=False, thresholds=OFTEN)
        with guard:
            for _ in range(2):
                answers = run(core, asked)
        stats = core.stats()
        assert stats.prefix_cache_hits > 0 and (stats.num_draft_tokens > 0) == drafts
        assert device == "cpu" or stats.num_graph_steps > 0
        found.append({key: answer.token_ids for key, answer in answers.items()})
        core.shutdown()
    same = sum(found[0][key] == found[1][key] for key in found[0])
    assert same >= len(asked) - 1, found  # a tie may fall the other way
