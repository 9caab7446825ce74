"""How many parts the KV of a request may be cut into, by what the parts cost."""

PARTS_BYTES = 512 << 20
"""Most that the partial results of one pass may take in a graph's memory."""

LEAST = 2
"""Parts that are allowed whatever they take, for batches with one long request."""


def fit_splits(most: int, part_bytes: int) -> int:
    """Parts whose results fit into ``PARTS_BYTES``.

    Args:
        most: What the user allows; 0 is no bound, and stays 0.
        part_bytes: Float32 results of all rows for one part.
    """
    return min(most, max(PARTS_BYTES // max(part_bytes, 1), LEAST))
