"""speculators' fused losses under torch 2.11."""

TILES, WARPS = (4096, 8192, 16384), (8, 16, 32)


def own_tiles() -> None:
    """Give each of its two autotuned kernels a list of tiles of its own, where Dynamo stops at the one that they share;
    of 25 the eight around those that its authors name as fastest, for each is compiled. They take 2% of a step."""
    from speculators.losses import fused

    for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
        kernel.configs = [c for c in kernel.configs if c.kwargs["BLOCK_SIZE"] in TILES and c.num_warps in WARPS]
