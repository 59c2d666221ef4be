"""What a packet says outlives the packet."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headway.runner.results import ResultLayout, unpack_results


def test_nothing_of_a_result_lies_in_the_packets_buffer() -> None:
    """The buffer goes back to the next step's copy at once."""
    packet = np.arange(100, dtype=np.int32)
    layout = ResultLayout(num_rows=3, padded_rows=4, vector=5, token_vector=2, num_tokens=6, padded_tokens=8)
    result = unpack_results(packet, layout)
    before = {name: value.copy() for name, value in vars_of(result).items()}
    packet.fill(-1)
    assert {"vectors", "token_vectors"} <= set(before)
    for name, value in vars_of(result).items():
        assert value.tobytes() == before[name].tobytes(), name


def vars_of(result: object) -> dict[str, npt.NDArray[Any]]:
    """Its arrays."""
    names = [name for name in dir(result) if not name.startswith("_")]
    return {name: value for name in names if isinstance(value := getattr(result, name), np.ndarray)}
