"""Which KV heads a tensor-parallel rank owns."""


def head_range(rank: int, tensor_parallel: int, num_heads: int) -> tuple[int, int]:
    """Rank i of a worker with TP = a owns heads [iH/a, (i+1)H/a); where TP exceeds H, heads are replicated."""
    if tensor_parallel <= num_heads:
        share = num_heads // tensor_parallel
        return rank * share, (rank + 1) * share
    head = rank * num_heads // tensor_parallel
    return head, head + 1
