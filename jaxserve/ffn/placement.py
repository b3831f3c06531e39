"""Where routed experts live: experts over the ep axis, in order, padded to a multiple of it."""


def physical_experts(experts: int, expert_ranks: int) -> int:
    """Expert slots over all ranks, so that every rank has equally many. The slots past `experts`
    hold zeros and are never chosen; this number itself is the sentinel of padding tokens."""
    return -(-experts // expert_ranks) * expert_ranks
