"""``headway bench anchors``: the workloads this engine is judged by, beside another engine's and the card's limits."""
