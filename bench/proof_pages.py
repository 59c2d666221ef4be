"""Writes docs/proof.md and docs/syncs-accuracy.md from the reports; sections whose figures were not measured are left out.

    python bench/proof_pages.py [--simulation F] [--simulation-soak F] [--planted F] [--gpu F] [--heldout F]
        [--documented F] [--soak F ...] [--programs FOLDER] [--out docs]

F default to simulation.json, simulation-soak.json, planted-faults.json, h200.json, heldout.json,
documented-first.json and soak-h?00*.json in
bench/reports/proof. FOLDER, the same place, has what bench/proof_syncs.py reads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.proof_syncs import paragraph, sections  # noqa: E402 - the script runs from anywhere

REPORTS = ROOT / "bench" / "reports" / "proof"
DETECTORS = {
    "live": "live guard (`syncs.forbid()`, `record()`)",
    "both": "`headway syncs --driver cupti`: live guard and CUPTI",
    "cupti": "CUPTI alone (the truth the labels are held against)",
    "profiler": "torch.profiler's records alone",
    "torch": "`torch.cuda.set_sync_debug_mode` alone",
    "simulation": "`headway syncs --simulate`, without a GPU",
}


def read(path: Path) -> dict[str, Any]:
    """A report; empty where there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def corpus_results(simulation: dict[str, Any], gpu: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Detector -> its line, of those that ran."""
    results = dict(simulation.get("corpus", {}).get("results", {}))
    for name, part in gpu.get("parts", {}).items():
        if name.startswith("corpus-"):
            results |= part["result"].get("results", {})
    return {name: results[name] for name in DETECTORS if name in results and "seen" in results[name]}


def accuracy_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Precision and recall of each detector."""
    lines = ["| detector | snippets | precision | recall | misses | false alarms |", "|---|---|---|---|---|---|"]
    for name, line in results.items():
        missed, false = (", ".join(line[key]) or "none" for key in ("missed", "false_alarms"))
        lines.append(
            f"| {DETECTORS[name]} | {line['snippets']} | {line['precision']} | {line['recall']} | {missed} | {false} |"
        )
    return lines


def detectors_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The report's detectors in the page's order."""
    return {name: report["results"][name] for name in DETECTORS if name in report["results"]}


def heldout_section(heldout: dict[str, Any]) -> list[str]:
    """What was measured on snippets that tuned nothing."""
    return [
        *paragraph(
            f"**Held out**: {heldout['labels']} snippets of `tests/syncs/heldout`, written from algorithms and training loops,",
            f"which tuned no rule. CUPTI labelled them on an {heldout['gpu']} (torch {heldout['torch']},",
            "`python -m bench.syncs_heldout --label`), after the simulation's rules were fixed.",
            f"The simulation ran on torch {heldout['simulation_torch']}.",
        ),
        *paragraph(
            "**At the first run, on an H200, the live guard had .988 and .988, the simulation .976 and 1.0.**",
            "The labeller did not hear autograd's own thread then; labels were made anew. The guard's one miss led",
            "to a table of calls whose waits torch keeps silent about (`bench/syncs_unheard.py`). Torch's operator database",
            "made it, and some calls on sparse tensors, but it was made because of that miss:",
            "of the guard the figures below are no first run's.",
        ),
        *accuracy_table(detectors_of(heldout)),
        "",
    ]


def documented_section(first: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Snippets that people labelled before a card did: the first run, and what detectors say since their misses were mended."""
    line = first["simulation"]
    died = ", ".join(line["errors"])
    lines = [
        "## Labelled by hand, then on the card",
        "",
        *paragraph(
            f"{line['snippets']} snippets of `tests/syncs/documented`, of kinds that neither corpus has (scalers, hooks,",
            "functional transforms, subclasses, sparse and nested tensors, samplers, graphs). Their labels were written from",
            "CUDA's and torch's documentation before any detector ran. **First run of the simulation",
            f"(torch {line['torch']}), each snippet in a process of its own: precision {line['precision']}, recall",
            f"{line['recall']}; {len(line['errors'])} of {line['snippets']} died** ({died}; the last for want of an",
            "import of its own), and one that died has seen nothing.",
        ),
        *paragraph(
            f"Missed at first: {', '.join(line['missed'])}. False alarms: {', '.join(line['false_alarms']) or 'none'}."
        ),
    ]
    if not now:
        return lines
    lines += paragraph(
        f"An {now['gpu']} (torch {now['torch']}, CUPTI) has labelled them since, and what was missed was mended by classes, so",
        "the figures below are those of a regression test. `embedding_with_a_greatest_norm` does not wait, other than the hand",
        "had said; `activations_offloaded` waits in torch 2.11, and in 2.13 copies without blocking.",
    )
    return [*lines, *accuracy_table(detectors_of(now)), ""]


def accuracy_page(
    simulation: dict[str, Any],
    gpu: dict[str, Any],
    heldout: dict[str, Any],
    documented: dict[str, Any],
    now: dict[str, Any],
    programs: list[str],
) -> str:
    """docs/syncs-accuracy.md; ``programs``: the lines of its sections on whole programs."""
    results = corpus_results(simulation, gpu)
    labels = simulation["corpus"]["labels"]
    waiting = sum(kind != "none" for kind in labels.values())
    about: dict[str, Any] = gpu.get("parts", {}).get("corpus-cupti", {}).get("result", {})
    lines = ["# How well `headway syncs` sees", ""]
    lines += paragraph("Written by `bench/proof_pages.py` from `bench/reports/proof`; do not edit.")
    lines += paragraph(
        "On programs that it had not seen (115 snippets from outside, commit 2c371dc, one H200) the live guard had a",
        "precision of .946 and a recall of .98, torch.profiler's records 1.0 and 1.0, and the simulation, which had no",
        "backend of its own and no rules from a card yet, .82 and .59.",
    )
    if heldout:
        lines += heldout_section(heldout)
    if documented:
        lines += documented_section(documented, now)
    lines += programs
    lines += ["## The corpus that the rules grew with", ""]
    told = [
        f"`tests/syncs/corpus` holds {len(labels)} snippets; {waiting} wait, {len(labels) - waiting} do not.",
        "Each is run once to warm up, then once under the detector. Snippets and detectors grew together: on a program of",
        "yours a detector may do worse, and what it is blind to by design (`docs/syncs.md`) is hardly in here.",
    ]
    if about:
        told += [
            f"Measured on an {about['gpu']} (torch {about['torch']}, cupti-python {about['cupti_python']}).",
            f"Labels that what CUPTI saw contradicts: {', '.join(about.get('wrong_labels', [])) or 'none'}.",
            "Loops around a query never block in the driver, so CUPTI cannot see them; their labels are ours.",
        ]
    lines += paragraph(*told)
    lines += [*accuracy_table(results), "", "## Every snippet", ""]
    lines += [f"| snippet | label | {' | '.join(results)} |", "|---" * (len(results) + 2) + "|"]
    for name, kind in sorted(labels.items()):
        seen = [", ".join(sorted(set(line["seen"].get(name, ["did not run"])))) or "-" for line in results.values()]
        lines.append(f"| {name} | {'-' if kind == 'none' else kind} | {' | '.join(seen)} |")
    return "\n".join(lines) + "\n"


def simulated_section(simulation: dict[str, Any], soak: dict[str, Any]) -> list[str]:
    """1: the feature matrix and the random scenarios."""
    matrix, played = simulation["matrix"], simulation["scenarios"]
    depths = ", ".join(str(depth) for depth in matrix["depths"])
    return [
        "## 1. The engine on the simulated device",
        "",
        *paragraph(
            f"{matrix['features']} sampling features alone and mixed, run-ahead {depths}, graphs and eager, a roomy pool and",
            f"one that preempts: {matrix['engines']} engines, {matrix['requests']:,} requests, {matrix['steps']:,} steps,",
            f"{matrix['device_operations']:,} device operations, {matrix['zombie_rows']:,} zombie rows,",
            f"{matrix['preemptions']:,} preemptions. **Host waits on the launching thread: 0; races: 0; broken invariants: 0;",
            "answers that differ from the synchronous oracle's: 0** (the run stops at the first). The readback waited",
            f"{matrix['readback_waits']:,} times, as it may. CPU time: {matrix['cpu_seconds']:.0f} s on one core.",
        ),
        *paragraph(
            f"{played['number']} random scenarios (requests, arrivals, aborts, sizes, depths, delays from one number) pass in",
            f"{played['cpu_seconds']:.0f} s; `make test` plays 120, `make soak` 2,000 new ones.",
            *([soaked(soak)] if soak else []),
            "`docs/simulation.md` says what is checked, and what is not.",
        ),
    ]


def kinds_section(kinds: list[dict[str, Any]], features: int) -> list[str]:
    """What kinds of models do with all features, and what they refuse."""
    lines = [
        *paragraph(
            f"All {features} features in one batch on a tiny model of each kind, with chunks, hits and few blocks. Answers are",
            "those of an engine that does one step after the other, and, but for a grammar that the host holds, each token is",
            "judged by the features' definitions on transformers' logits (`tests/engine/oracle.py`). No sampling feature is",
            "refused or turned off. *Log* tells kinds whose log names requests for which fast prefill is turned off.",
        ),
        "| kind | depth | steps | of graphs | preempted | tokens hit | drafts taken | tokens judged | log | refused |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in kinds:
        numbers = [row[name] for name in ("depth", "steps", "graph_steps", "preemptions", "hits", "accepted", "judged")]
        cells = [row["kind"], *map(str, numbers), "yes" if row["told"] else "", ", ".join(row["refused"])]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "What is refused is refused at the start, by name:", ""]
    for option in sorted({option for row in kinds for option in row["refused"]}):
        whys: dict[str, list[str]] = {}
        for row in kinds:
            if option in row["refused"]:
                why = re.sub(r"\w+For(CausalLM|ConditionalGeneration)", "the model", row["refused"][option])
                whys.setdefault(why, []).append(row["kind"].partition(" (")[2].rstrip(")"))
        for why, names in whys.items():
            lines += textwrap.wrap(f'- {option}: "{why}" ({"; ".join(names)})', 130, subsequent_indent="  ")
    return [*lines, ""]


def soaked(soak: dict[str, Any]) -> str:
    """A sentence on thousands of seeds."""
    number, seeds = soak["number"], f"{soak['first']}-{soak['first'] + soak['number'] - 1}"
    said = f"**{number - len(soak['failed']):,} of {number:,} scenarios of the soak passed**"
    said += f" (seeds {seeds}, {soak['cpu_seconds']:.0f} s of CPU)"
    if soak["mended"]:
        said += f", {len(soak['mended'])} of them only after what made them fail was mended (`docs/log.md`)"
    again = "; ".join(f"`{each['again']}`" for each in soak["failed"])
    return f"{said}; those that fail: {again}." if again else f"{said}."


def planted_section(planted: list[dict[str, Any]]) -> list[str]:
    """2: planted faults."""
    caught = sum(each["caught"] for each in planted)
    catalogue = tomllib.loads((ROOT / "tests" / "planted" / "faults.toml").read_text(encoding="utf-8"))["fault"]
    named = {fault["name"] for fault in catalogue if fault.get("expect")} & {each["fault"] for each in planted}
    minutes = sum(each["seconds"] for each in planted) / 60
    meant = sum(each["as_meant"] for each in planted if each["fault"] in named)
    return [
        "## 2. Planted faults",
        "",
        *paragraph(
            f"**{caught} of {len(planted)} caught**, in {minutes:.0f} minutes of work. For {len(named)} the catalogue names",
            f"the error that should report them, and {meant} were so reported; for the others any failing check counts.",
            "The tests grew with these faults, so this says little about new ones: `docs/planted-faults.md` has the batches",
            "that were held out, with the share of each that was caught at its first run, and every fault with the check",
            "that caught it.",
        ),
    ]


def calls_section(gpu: dict[str, Any]) -> list[str]:
    """4: CUDA calls per decode step."""
    parts = {name: gpu["parts"][name] for name in ("calls-graphs", "calls-eager") if name in gpu.get("parts", {})}
    parts = {name: part["result"] for name, part in parts.items() if part["result"].get("features")}
    if not parts:
        return []
    first = next(iter(parts.values()))
    lines = [
        "## 4. CUDA calls of the launching thread per decode step",
        "",
        *paragraph(
            f"{first['gpu']}, torch {first['torch']}, {first['model']} with random weights, {first['rows']} rows",
            f"(mixed: one row a feature), counted by {first['counted_by']}. *Waits*: blocking calls inside launches and",
            "between them, in all steps; back-pressure, where the loop waits for the oldest step on purpose, is counted apart.",
        ),
        "| | steps | waits | back-pressure | H2D copies | D2H copies | graph launches | kernel launches |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        lines.append(f"| **{name.removeprefix('calls-')}** | | | | | | | |")
        for feature, line in part["features"].items():
            if "error" in line:
                lines.append(f"| {feature} | failed: {line['error']} | | | | | | |")
                continue
            lines.append(
                f"| {feature} | {line['steps']} | {line['launch_waits'] + line['rest_waits']} | {line['collect_waits']} | "
                f"{line['h2d_per_step']} | {line['d2h_per_step']} | {line['graph_launches_per_step']} | "
                f"{line['kernel_launches_per_step']} |"
            )
    return [*lines, ""]


GENERATE = {
    "generate": "by torch.profiler's records, which also see the GPU",
    "generate-cupti": "by CUPTI's callbacks, as it happens",
}
MAX_LINES = 12
"""Of a table of findings."""


def generate_section(gpu: dict[str, Any]) -> list[str]:
    """5: a program nobody here wrote."""
    parts = {name: gpu["parts"][name] for name in GENERATE if gpu.get("parts", {}).get(name, {}).get("result")}
    if not parts:
        return []
    command = " ".join(next(iter(parts.values()))["result"]["command"])
    lines = ["## 5. transformers' `generate` under `headway syncs`", ""]
    lines += paragraph(f"`{command}`: a small Qwen3 with random weights, sampled, from the import to the last token.")
    for name, part in parts.items():
        lines += found_by(GENERATE[name], part)
    return lines


def found_by(how: str, part: dict[str, Any]) -> list[str]:
    """What one driver probe found."""
    result = part["result"]
    totals, busy = result["totals"], (result.get("gpu") or {}).get("busy_percent")
    lost, findings = totals["micros_lost"], result["findings"]
    said = f"**{len(findings)} findings {how}:** {totals['unsanctioned']} host waits"
    said += f", {lost / 1000:.1f} ms of {result['wall_micros'] / 1000:.0f} ms lost in them" if lost else ""
    said += f"; GPU busy {busy} % (profiled)." if busy is not None else "."
    lines = [said, ""]
    if part.get("page_bytes"):
        lines += ["The page: `docs/syncs-generate.html` (open it in a browser).", ""]
    lines += ["| line | call | kind | count | us | cure |", "|---|---|---|---|---|---|"]
    for found in findings[:MAX_LINES]:
        where = "/".join(Path(found["file"]).parts[-3:]) + f":{found['line']}"
        micros = "-" if found["micros"] is None else f"{found['micros']:,.0f}"
        lines.append(
            f"| {where} | {found['call']} | {found['kind']} | {found['count']} | {micros} | {found['fix']['name']} |"
        )
    if len(findings) > MAX_LINES:
        lines.append(f"| {len(findings) - MAX_LINES} more | | | | | |")
    return [*lines, ""]


def soak_section(soaks: list[dict[str, Any]]) -> list[str]:
    """The soaks of issue 4, where some were run."""
    if not soaks:
        return []
    lines = ["## Soak", ""]
    lines += paragraph(
        "Random requests with all features, bursts, aborts, memory short enough to preempt (`bench/soak.py`). A sample is",
        "asked for again, each request alone, at depth 0 and ahead: those batches are the same, so the tokens must be. In",
        "the crowd the last bits of a product depend on how many rows share it, and a draw between two near tokens may go",
        "the other way.",
    )
    lines += [
        "| card, model, dtype | guard | minutes | finished | aborted | tokens | steps | preemptions | alone = depth 0 "
        "| in the crowd = depth 0 | wrong |",
        "|---" * 11 + "|",
    ]
    for soak in soaks:
        counts = " | ".join(f"{soak[name]:,}" for name in ("finished", "aborted", "tokens", "steps", "preemptions"))
        alone = f"{soak['agreed_alone']} of {soak['checked']}" if "agreed_alone" in soak else "not asked"
        wrong = "; ".join(soak["wrong"]) or ("nothing" if soak["over"] else "ended early")
        model = Path(soak["model"]).name
        cached = ", keys and values in 8 bits" if soak.get("kv_cache_dtype", "auto") != "auto" else ""
        cached += ", drafts" if soak.get("drafted") else ""
        lines.append(
            f"| {soak['device']}, {model}, {soak['dtype']}{cached} | {soak['guard']} "
            f"| {soak['seconds'] / 60:.1f} | {counts} | {alone} "
            f"| {soak['agreed']} of {soak['checked']} | {wrong} |"
        )
    return [*lines, ""]


def proof_page(
    simulation: dict[str, Any],
    simulation_soak: dict[str, Any],
    planted: list[dict[str, Any]],
    gpu: dict[str, Any],
    soaks: list[dict[str, Any]],
) -> str:
    """docs/proof.md."""
    lines = [
        "# What the proof shows",
        "",
        "Written by `bench/proof_pages.py` from `bench/reports/proof`; do not edit. To measure again:",
        "",
        "```",
        "python bench/proof_simulation.py --json bench/reports/proof/simulation.json          on any machine",
        "python bench/simulation_soak.py --number 2000 --json bench/reports/proof/simulation-soak.json",
        "python tools/planted_faults.py --json bench/reports/proof/planted-faults.json --markdown docs/planted-faults.md",
        "python bench/proof.py --json bench/reports/proof/h200.json --html docs/syncs-generate.html       on a GPU",
        "python bench/soak.py --seconds 280 --json bench/reports/proof/soak-h200.json                    on a GPU",
        "python bench/proof_pages.py",
        "```",
        "",
        *simulated_section(simulation, simulation_soak),
        *(kinds_section(simulation["kinds"], simulation["matrix"]["features"]) if "kinds" in simulation else []),
        *(planted_section(planted) if planted else []),
        "## 3. The sync detector against a corpus",
        "",
        *accuracy_table(corpus_results(simulation, gpu)),
        "",
        "Snippet by snippet: `docs/syncs-accuracy.md`.",
        "",
        *calls_section(gpu),
        *generate_section(gpu),
        *soak_section(soaks),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulation", type=Path, default=REPORTS / "simulation.json")
    parser.add_argument("--simulation-soak", type=Path, default=REPORTS / "simulation-soak.json")
    parser.add_argument("--planted", type=Path, default=REPORTS / "planted-faults.json")
    parser.add_argument("--gpu", type=Path, default=REPORTS / "h200.json")
    parser.add_argument("--heldout", type=Path, default=REPORTS / "heldout.json")
    parser.add_argument("--documented", type=Path, default=REPORTS / "documented-first.json")
    parser.add_argument("--documented-now", type=Path, default=REPORTS / "documented.json")
    parser.add_argument(
        "--programs", type=Path, default=REPORTS, help="folder of the reports on whole programs (syncs-*.json)"
    )
    parser.add_argument("--soak", type=Path, nargs="*", default=sorted(REPORTS.glob("soak-h?00*.json")))
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args(arguments)
    simulation, gpu, long = read(given.simulation), read(given.gpu), read(given.simulation_soak)
    soaks = [read(path) for path in given.soak if path.exists()]
    planted = json.loads(given.planted.read_text(encoding="utf-8")) if given.planted.exists() else []
    (given.out / "syncs-accuracy.md").write_text(
        accuracy_page(
            simulation,
            gpu,
            read(given.heldout),
            read(given.documented),
            read(given.documented_now),
            sections(given.programs),
        ),
        encoding="utf-8",
    )
    (given.out / "proof.md").write_text(proof_page(simulation, long, planted, gpu, soaks), encoding="utf-8")


if __name__ == "__main__":
    main()
