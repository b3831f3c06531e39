"""Where routed experts live: experts over the ep axis, in order, padded to a multiple of it."""


def physical_experts(experts: int, expert_ranks: int) -> int:
    """The number of expert slots: `experts`, padded so that every ep rank holds equally many. The
    padding slots hold zeros and are never chosen; the number itself is the expert id of padding
    tokens."""
    return -(-experts // expert_ranks) * expert_ranks
