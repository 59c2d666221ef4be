"""What benches say of drafts."""

from __future__ import annotations

from headway.cli.bench import drafts, metrics


def test_drafts_of_a_server_are_read_from_its_metrics() -> None:
    lines = [
        "# HELP headway:spec_decode_num_drafts_total Rows of drafts that were verified.",
        'headway:spec_decode_num_drafts_total{model_name="m"} 40.0',
        'headway:spec_decode_num_draft_tokens_total{model_name="m"} 1.2e+02',
        'headway:spec_decode_num_accepted_tokens_total{model_name="m"} 60.0',
        'headway:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 40.0',
    ]
    found = drafts.published("\n".join(lines))
    assert found == drafts.DraftCounts(40, 120, 60) and drafts.published("up 1.0") is None
    figures = found.since(drafts.DraftCounts(20, 60, 40)).figures()
    assert figures["spec_decode_num_draft_tokens"] == 60 and figures["spec_decode_acceptance_length"] == 2.0
    assert "acceptance length: 2.50" in drafts.sentence(found) and drafts.sentence(None) == ""
    nothing = found.since(found)
    assert nothing.figures()["spec_decode_acceptance_length"] is None and "nothing was drafted" in drafts.sentence(
        nothing
    )
    settings = metrics.Settings(float("inf"), None, (), (), {})
    block = metrics.block(metrics.figures([], [], 0.0, settings) | figures, settings)
    assert "Speculative Decoding" in block and "Acceptance length:                       2.00" in block
