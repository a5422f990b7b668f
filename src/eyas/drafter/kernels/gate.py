"""silu(gate) * up of the MLP, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def forward(gate_up: Tensor) -> Tensor:
    """[R, 2I], gate before up, -> [R, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _forward[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK)
    return out


def backward(d_out: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up."""
    rows, width = d_out.shape
    d_gate_up = torch.empty_like(gate_up)
    _backward[(rows, triton.cdiv(width, _BLOCK))](d_out, gate_up, d_gate_up, width, BLOCK=_BLOCK)
    return d_gate_up


@triton.jit
def _forward(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(d_out_ptr, gate_up_ptr, d_gate_up_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at, up_at = row * 2 * width + column, (row * 2 + 1) * width + column
    gate = tl.load(gate_up_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + up_at, mask=inside, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = d_out * up * share * (1.0 + gate * (1.0 - share))
    tl.store(d_gate_up_ptr + gate_at, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(d_gate_up_ptr + up_at, (d_out * gate * share).to(d_gate_up_ptr.dtype.element_ty), mask=inside)
