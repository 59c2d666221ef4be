"""Options of vLLM, SGLang and text-embeddings-inference that there are none of here, and what to do instead."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand

_ADAPTERS: Final = "adapters are not served; merge them into the weights"
_MEMORY: Final = "weights and keys stay on the device; lower --max-model-len or --max-num-seqs"
_COMPILED: Final = (
    "graphs are captured for the sizes that are used; leave it out, or switch them off by --enforce-eager"
)
_OVERLAP: Final = "steps always run ahead; leave it out, or set how far by --run-ahead"
_TEXTS: Final = "texts of requests are never logged; leave it out (--access-log shows their paths)"
_DRAFTS: Final = 'use --speculative-config \'{"method": ..., "num_speculative_tokens": ...}\''
_NAMED: Final = "name the model as the argument"

INSTEAD: Final = {
    "--allow-credentials": "pages of other origins send no cookies here; leave it out",
    "--async-scheduling": _OVERLAP,
    "--attention-backend": "kernels are chosen by the card; leave it out",
    "--auto-truncate": "use truncate_prompt_tokens or truncate in requests",
    "--chat-template-content-format": "it is read off the template; leave it out",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--compilation-config": _COMPILED,
    "--context-length": "use --max-model-len",
    "--cpu-offload-gb": _MEMORY,
    "--cuda-graph-max-bs": _COMPILED,
    "--cuda-graph-sizes": _COMPILED,
    "--disable-cuda-graph": "use --enforce-eager",
    "--disable-log-requests": _TEXTS,
    "--disable-overlap-schedule": "use --run-ahead 0",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--download-dir": "set HF_HOME",
    "--dp": "use --data-parallel-size",
    "--dp-size": "use --data-parallel-size",
    "--enable-auto-tool-choice": "tools need no switch; leave it out",
    "--enable-chunked-prefill": "prompts always run in chunks; leave it out (--max-num-batched-tokens sets their size)",
    "--enable-log-requests": _TEXTS,
    "--enable-lora": _ADAPTERS,
    "--enable-metrics": "/metrics needs no switch; leave it out",
    "--enable-prompt-tokens-details": "usage always has them; leave it out",
    "--ep-size": "use --enable-expert-parallel",
    "--guided-decoding-backend": "the way is chosen for each schema; leave it out",
    "--is-embedding": "use --runner pooling, or leave it out: models that pool are known by their files",
    "--kv-transfer-config": "the KV cache is not moved between servers; leave it out",
    "--logits-processors": "code from outside is not run; logit_bias, bad_words and allowed_token_ids are served",
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--max-batch-tokens": "use --max-num-batched-tokens",
    "--max-client-batch-size": "use --max-inputs",
    "--max-concurrent-requests": "use --max-queue",
    "--max-log-len": _TEXTS,
    "--max-lora-rank": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-num-partial-prefills": "prompts run one after the other; leave it out",
    "--max-running-requests": "use --max-num-seqs",
    "--max-seq-len-to-capture": _COMPILED,
    "--max-total-tokens": "use --kv-cache-memory-bytes",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--middleware": "code from outside is not run; put a proxy before the server",
    "--mm-processor-kwargs": "pictures are prepared as the model's files say; leave it out",
    "--model-id": _NAMED,
    "--model-path": _NAMED,
    "--no-async-scheduling": "use --run-ahead 0",
    "--no-enable-chunked-prefill": "prompts always run in chunks; leave it out",
    "--num-scheduler-steps": _OVERLAP,
    "--override-generation-config": "use --generation-config, or a folder with another generation_config.json",
    "--page-size": "use --block-size",
    "--pooling": "how a model pools is read from its files; leave it out, or use --pooler-config",
    "--quantization-param-path": "8-bit keys have no scales here; leave it out",
    "--reasoning-parser": "what the model thinks stays in the text of its answer; leave it out",
    "--response-role": "answers are the assistant's; leave it out",
    "--rope-scaling": "use --hf-overrides '{\"rope_scaling\": ...}'",
    "--rope-theta": "use --hf-overrides '{\"rope_theta\": ...}'",
    "--root-path": "let the proxy take the prefix off",
    "--schedule-policy": "requests run in the order of their arrival; leave it out",
    "--scheduling-policy": "requests run in the order of their arrival; leave it out",
    "--skip-server-warmup": "kernels and graphs are made before the first request; leave it out",
    "--speculative-algorithm": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--structured-outputs-config": "the way is chosen for each schema; leave it out",
    "--swap-space": _MEMORY,
    "--tensor-parallel": "use --tensor-parallel-size",
    "--tokenization-workers": "long texts are tokenised beside the event loop; leave it out",
    "--tokenizer-mode": "there is one way; leave it out",
    "--tokenizer-path": "use --tokenizer",
    "--tp": "use --tensor-parallel-size",
    "--tp-size": "use --tensor-parallel-size",
    "--trust-remote-code": "code from model repositories is never run; leave it out",
    "--uvicorn-log-level": "use headway --verbose serve, or --no-access-log",
}
"""The option as the other engine spells it -> the rest of the message."""


class Command(TyperCommand):
    """A command whose error names what stands for an option that another engine has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            instead = INSTEAD.get(str(getattr(error, "option_name", "")))
            if instead is not None and hasattr(error, "message"):
                error.message = f"{error.message}: {instead}"
                error.possibilities = None  # type: ignore[attr-defined]
            raise
