"""Matrix products of a training step, counted from shapes, and what devices can do: together the MFU.

Counted is what the maths needs, once, whatever an implementation computes: step 0 keys and values of every token, all
else only for rows that are trained at a step, attention only over visible keys, the embedding's half of q, k, v once a
token, the target's distribution once a teaching position. A product of [m, k] and [k, n] is 2mkn; its backward costs
as much again for each of its factors that has a gradient.
"""

import numpy as np
import torch

from eyas.drafter.eagle3 import DrafterConfig
from eyas.drafter.pack import Pack

# Dense bf16 products a second, by the vendors' sheets, without sparsity; names as CUDA reports them.
_PEAK_BF16 = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "RTX PRO 6000": 5.03e14,
    "RTX 4090": 1.65e14,
    "RTX 3090": 7.1e13,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Products a second at best, or None where it isn't known (CPUs, unknown GPUs, fp32)."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_BF16.items() if known in name), None)


def step_flops(config: DrafterConfig, pack: Pack, *, trained_head: bool) -> float:
    """Products of one pack, forward and backward."""
    hidden, inner, drafts = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    query, key_value = config.num_attention_heads * config.head_dim, 2 * config.num_key_value_heads * config.head_dim
    alignment, tokens = pack.alignment, len(pack.token_ids)
    context = alignment.rows - alignment.start[alignment.rows] + 1  # keys that each computed row sees at step 0
    # fc and the embedding's half read constants: no gradient by their input.
    constant = 2.0 * tokens * hidden * (len(config.aux_layer_ids) * hidden + query + key_value)
    learned = 2.0 * tokens * hidden * key_value
    once = 2.0 * len(alignment.teachers) * hidden * drafts
    head, needed = 0.0, np.zeros(len(alignment.rows), dtype=bool)
    for k, step in reversed(list(enumerate(alignment.steps))):
        needed[step.row] = True  # a row that a later step trains passes through this one
        rows = int(needed.sum())
        per_row = hidden * (2 * query + 3 * inner) + (hidden * key_value if k else 0)
        reach = config.sliding_window - k if config.sliding_window else tokens
        seen = float(np.minimum(context[needed], reach).sum()) + k * rows
        learned += 2.0 * rows * per_row + 4.0 * seen * query
        head += 2.0 * len(step.row) * hidden * drafts
    return 2 * constant + 3 * learned + once + (3 if trained_head else 2) * head
