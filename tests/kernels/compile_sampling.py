"""Compiles the sampling kernels for sm_90 without a GPU and prints one JSON line each; run by ``test_sampling_compiles``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import triton
from triton.compiler import ASTSource

from headway.core.automaton import CLASS_INTS
from headway.kernels.chain_unpack.triton import ROWS as CHAIN_ROWS
from headway.kernels.chain_unpack.triton import chain_kernel
from headway.kernels.count_tokens.triton import MOST, add_kernel, clear_kernel, histogram_kernel
from headway.kernels.gather_logprobs.triton import CHUNK, FEW, MAX_SELECT, PART, chunk_kernel, merge_kernel
from headway.kernels.grammar_mask import BLOCK, RECORD_INTS, RECORDS
from headway.kernels.grammar_mask.triton import REGISTERS, WARPS, grammar_mask_kernel
from headway.kernels.ngram_draft.triton import BLOCK as NGRAM_BLOCK
from headway.kernels.ngram_draft.triton import MOST_PARTS, guess_kernel, search_kernel
from headway.kernels.sample import WIDE_K
from headway.kernels.sample.tiles import tile_for
from headway.kernels.sample.triton import FINISH_REGISTERS
from headway.kernels.sample.triton_finish import finish_kernel
from headway.kernels.sample.triton_race import race_kernel
from headway.kernels.sample.triton_wide import bound_kernel, narrow_kernel, record_words, wide_race_kernel
from headway.kernels.slot_advance.triton import slot_advance_kernel
from headway.kernels.step_unpack.triton import step_unpack_kernel
from headway.kernels.suffix_draft.reference import PARTS, SLACK
from headway.kernels.suffix_draft.triton import BLOCK as SUFFIX_BLOCK
from headway.kernels.suffix_draft.triton import suffix_guess_kernel, suffix_search_kernel
from headway.kernels.suffix_keep.triton import BLOCK as KEEP_BLOCK
from headway.kernels.suffix_keep.triton import suffix_copy_kernel, suffix_count_kernel
from headway.kernels.synthetic_accept.triton import synthetic_kernel
from tests.kernels.compile_forward import build

VOCAB, ROWS = 151936, 64
REALS = (
    "temperature", "top_p", "min_p", "best_score", "part_top", "part_sum", "values", "chunk_sum", "logprobs",
    "repetition", "frequency", "presence",
)  # fmt: skip
NUMBERS = (
    "row_stride", "vocab", "num_slots", "chunks", "parts", "width", "table_width", "length", "bound", "least",
    "searches", "level", "max_entries", "table_ints", "num_words", "stop_width", "ring_size", "ring_stride", "num_rows",
    "kept_width", "packed_size", "max_rows", "max_tokens", "num_drafts", "offset", "kv_stride", "number", "min_n",
    "max_n", "always", "part", "rows", "columns", "block_size", "link", "first",
    "size", "kept", "max_match",
)  # fmt: skip


def compile_kernel(
    name: str, kernel: Any, logits: str, constants: Mapping[str, object], num_warps: int, **options: int
) -> None:
    """Compile with the types the launchers pass; pointers and the vocabulary are 16-aligned."""
    if "EARLY" in kernel.arg_names:
        constants = {**constants, "EARLY": True}
    signature, constexprs, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
        elif argument in NUMBERS:
            signature[argument] = "i32"
        else:
            types = {"logits": logits, "counts": "*i16", "wide": "*i64", "best": "*i64", "cursor": "*i64"}
            types |= {"factor": "fp32", "min_prob": "fp32"}
            signature[argument] = types.get(argument, "*fp32" if argument in REALS else "*i32")
        if argument not in constants and argument not in NUMBERS[2:]:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    built, report = build(source, {"num_warps": num_warps, **options})
    ptx = built.asm["ptx"]
    figures = {
        "name": name,
        "shared": built.metadata.shared,
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spilled": sum(int(number) for number in re.findall(r"(\d+) bytes spill", report)),
        "wide_loads": len(re.findall(r"ld\.global\.v[48]", ptx)),
    }
    print(json.dumps(figures), flush=True)


def compile_sample(logits: str, random: bool, filtered: bool, vocab: int = VOCAB) -> None:
    tile = tile_for(ROWS, vocab, filtered)
    chunks = triton.cdiv(vocab, tile.block)
    parts = chunks * tile.block // tile.part
    kind = {"FILTER": filtered, "GREEDY_EPS": 1e-5, "PART": tile.part}
    name = f"{logits} random={random} filtered={filtered} V={vocab}"
    race = {**kind, "RANDOM": random, "BLOCK": tile.block}
    compile_kernel(f"race {name}", race_kernel, logits, race, tile.num_warps)
    finish = {**kind, "CHUNKS": triton.next_power_of_2(chunks), "PARTS": triton.next_power_of_2(parts)}
    finish |= {"GATHER": tile.gather, "SMALL": tile.small, "LARGE": tile.large, "PIVOTS": tile.pivots}
    finish |= {"chunks": 1} if chunks == 1 else {}  # the launcher makes a constant of an integer that is 1
    finish |= {"WIDE_K": WIDE_K, "WORDS": record_words(tile.levels, tile.wide_pivots)}
    warps = tile.finish_warps if filtered else 1
    compile_kernel(f"finish {name}", finish_kernel, logits, finish, warps, maxnreg=FINISH_REGISTERS)


def compile_wide(logits: str) -> None:
    tile = tile_for(ROWS, VOCAB, filtered=True)
    size = {"WORDS": record_words(tile.levels, tile.wide_pivots), "SEGMENT": tile.segment}
    cut = {**size, "PIVOTS": tile.wide_pivots, "BLOCK": 512}
    compile_kernel(f"narrow {logits}", narrow_kernel, logits, cut, 4)
    bound = {"LEVELS": tile.levels, "PIVOTS": tile.wide_pivots, "ROW_PIVOTS": tile.pivots}
    bound |= {"SMALL": tile.small, "LARGE": tile.large}
    compile_kernel(f"bound {logits}", bound_kernel, logits, {**size, **bound}, 8)
    compile_kernel(f"wide race {logits}", wide_race_kernel, logits, {**size, "BLOCK": 1024}, 4)


def compile_logprobs(logits: str) -> None:
    kind = {"BLOCK": CHUNK, "PART": PART}
    compile_kernel(f"logprobs chunk {logits}", chunk_kernel, logits, kind, 8)
    chunks = triton.cdiv(VOCAB, CHUNK)
    merge = {"CHUNKS": triton.next_power_of_2(chunks), "PARTS": triton.next_power_of_2(chunks * CHUNK // PART)}
    for entries, candidates in ((FEW, 256), (MAX_SELECT, 1024)):
        size = {
            "ENTRIES": triton.next_power_of_2(1 + entries),
            "CANDIDATES": candidates,
            "SORTED": False,
        }
        compile_kernel(f"logprobs merge {entries} {logits}", merge_kernel, logits, {**merge, "PART": PART, **size}, 8)


def main() -> None:
    for grammar in (False, True):
        absent = dict.fromkeys(
            () if grammar else ("grammar_on", "grammar_info", "grammar_state", "grammar_table", "vocabulary")
        )
        advance = {**absent, "CLASS_INTS": CLASS_INTS, "STOPS": 64, "GRAMMAR": grammar}
        no_drafts = dict.fromkeys(("drafts", "next_slots", "offset"))
        compile_kernel(
            f"advance grammar={grammar}", slot_advance_kernel, "", {**advance, **no_drafts, "OUTCOMES": 1}, 1
        )
        compile_kernel(f"advance a run, grammar={grammar}", slot_advance_kernel, "", {**advance, "OUTCOMES": 5}, 1)
    size = {"BLOCK_SIZE": 16, "BLOCK": 32, "GROUPS": 1}
    compile_kernel(
        "unpack",
        step_unpack_kernel,
        "",
        {**size, "num_tokens": None, "drafts": None, "num_drafts": None, "WIDTH": 1},
        4,
    )
    compile_kernel("unpack drafts", step_unpack_kernel, "", {**size, "GROUPS": 2, "WIDTH": 5}, 4)
    for logits in ("*bf16", "*fp32"):
        mask = {"CLASS_INTS": CLASS_INTS, "BLOCK": BLOCK, "RECORD_INTS": RECORD_INTS, "RECORDS": RECORDS, "ROWS": 256}
        compile_kernel(f"grammar mask {logits}", grammar_mask_kernel, logits, mask, WARPS, maxnreg=REGISTERS)
        for random, filtered in ((False, False), (True, False), (True, True)):
            compile_sample(logits, random, filtered)
        compile_wide(logits)
        compile_logprobs(logits)
    for filtered in (False, True):
        compile_sample("*fp32", True, filtered, vocab=112)
    compile_kernel("clear counts", clear_kernel, "", {"BLOCK": 4096}, 4)
    compile_kernel("histogram", histogram_kernel, "", {"MOST": MOST, "BINS": 2048, "BLOCK": 1024}, 8)
    compile_kernel("search", search_kernel, "", {"PARTS": MOST_PARTS, "BLOCK": NGRAM_BLOCK}, 4)
    compile_kernel("suffix search", suffix_search_kernel, "", {"PARTS": PARTS, "BLOCK": SUFFIX_BLOCK}, 4)
    compile_kernel("suffix guess", suffix_guess_kernel, "", {"PARTS": PARTS, "SLACK": SLACK}, 4)
    for rows in (1, 256):
        compile_kernel("suffix copy", suffix_copy_kernel, "", {"ROWS": rows, "BLOCK": KEEP_BLOCK}, 4)
        compile_kernel("suffix count", suffix_count_kernel, "", {"ROWS": rows}, 4)
    compile_kernel("synthetic", synthetic_kernel, "", {}, 1)
    compile_kernel("chain", chain_kernel, "", {"ROWS": CHAIN_ROWS}, 1)
    compile_kernel("guess", guess_kernel, "", {"PARTS": MOST_PARTS, "PLACES": 8}, 1)
    compile_kernel("add counts", add_kernel, "", {"MOST": MOST, "BLOCK": 512}, 4)


if __name__ == "__main__":
    main()
