"""Hidden states as they are stored: encoded and checked on the device that made them.

One row is the H values of one token (and layer). Encodings: `bf16`; `fp8`, which is e4m3 with one float32 scale a row,
scale = largest magnitude / 448, so that the largest value takes the largest code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
FINE, NAN, INF, ZERO = 0, 1, 2, 3
FAULT_NAMES = {NAN: "NaN", INF: "Inf", ZERO: "only zeros"}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

# Values handled at once. On a CPU temporaries stay in cache (5 to 8 times faster than whole tensors); on a GPU below
# 1 GiB: whole tensors would take 5 GB for 8,192 tokens of H = 7168, beside an engine that has taken the rest.
_CPU_VALUES, _GPU_VALUES = 1 << 17, 1 << 25
_CPU_ERROR_STRIDE = 16


class Encoded(NamedTuple):
    """Rows ready to be stored.

    Attributes:
        values: bfloat16 or float8_e4m3fn, [..., H], contiguous.
        scales: float32 [...]; None for bf16.
        faults: int8 [...], one of FINE, NAN, INF, ZERO.
        error: float32 [..., 2]: the sums of squares of (decoded - given) and of given, zeros for rows that were not
            measured: sums over rows give their relative error. None for bf16.
    """

    values: Tensor
    scales: Tensor | None
    faults: Tensor
    error: Tensor | None


def encode(states: Tensor, encoding: str, every: int = 0) -> Encoded:
    """Encode float states [n, 3, H] or [n, H] as `bf16` or `fp8`, on their own device. On a GPU nothing waits for it.

    Args:
        states: bfloat16 ones come back as they are, without a copy, where `encoding` is bf16.
        every: the error is measured on every so many-th row; 0: on all rows on a GPU, every 16th on a CPU.
    """
    if encoding == "bf16":
        values = states.to(torch.bfloat16).contiguous()
        return Encoded(values, None, row_faults(values), None)
    values, scales = _encode_fp8(states)
    error = torch.zeros(*states.shape[:-1], 2, dtype=torch.float32, device=states.device)
    step = every or (1 if states.is_cuda else _CPU_ERROR_STRIDE)
    rows = slice(None, None, step)
    _measure(states[rows], values[rows], scales[rows], error[rows])
    return Encoded(values, scales, row_faults(values, scales), error)


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """Stored values [..., H] and scales [...] as bfloat16 [..., H]; bf16 comes back as it is, without a copy."""
    if scales is None:
        return values
    if values.device.type != "cpu":
        return (values.float() * scales.unsqueeze(-1)).to(torch.bfloat16)
    # Bit shifts put e4m3's exponent and mantissa into float16's places, off by a factor of 2^8 (biases 7 and 15): two
    # to three times faster on a CPU than torch's conversion, same values. It knows no NaN: row_faults refuses those.
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    flat, target = values.reshape(-1, values.shape[-1]), out.view(-1, values.shape[-1])
    factors = scales.reshape(-1, 1) * 2.0**8
    for rows in _pieces(flat):
        bits = (flat[rows].view(torch.int8).to(torch.int16) << 7) & -0x4080
        target[rows] = bits.view(torch.float16).float().mul_(factors[rows]).to(torch.bfloat16)
    return out


def row_faults(values: Tensor, scales: Tensor | None = None) -> Tensor:
    """What is wrong with each stored row: int8 [...] of FINE, NAN, INF, ZERO."""
    magnitude = _row_magnitude(values)
    faults = torch.full(magnitude.shape, FINE, dtype=torch.int8, device=values.device)
    if values.dtype == torch.bfloat16:
        faults.masked_fill_(magnitude > 0x7F80, NAN)  # never faults[mask] = NAN, which waits for a GPU
        faults.masked_fill_(magnitude == 0x7F80, INF)
    else:
        faults.masked_fill_(magnitude == 0x7F, NAN)
    if scales is not None:
        faults.masked_fill_(torch.isnan(scales), NAN)
        faults.masked_fill_(torch.isinf(scales), INF)
        faults.masked_fill_(scales <= 0, ZERO)
    return faults.masked_fill_(magnitude == 0, ZERO)


def _row_magnitude(values: Tensor) -> Tensor:
    """Largest bit pattern without its sign in each row, int16 [...]: floats of one sign sort like integers."""
    wide = values.dtype == torch.bfloat16
    bits, mask = (values.view(torch.int16), 0x7FFF) if wide else (values.view(torch.int8), 0x7F)
    if values.device.type != "cpu":
        return (bits & mask).amax(-1).to(torch.int16)
    flat = bits.reshape(-1, bits.shape[-1])
    top = torch.empty(len(flat), dtype=bits.dtype)
    for rows in _pieces(flat):
        torch.amax(flat[rows] & mask, -1, out=top[rows])
    return top.to(torch.int16).view(values.shape[:-1])


def _encode_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(states.shape, dtype=torch.float8_e4m3fn, device=states.device)
    scales = torch.empty(states.shape[:-1], dtype=torch.float32, device=states.device)
    flat, codes, factors = states.reshape(-1, states.shape[-1]), values.view(-1, states.shape[-1]), scales.view(-1)
    for rows in _pieces(flat):
        piece = flat[rows].float()
        scale = piece.abs().amax(-1) / E4M3_MAX
        factors[rows] = scale
        # Rows that row_faults refuses (scale 0, NaN or Inf) are divided by 1: any code will do for them.
        usable = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0).unsqueeze(-1)
        codes[rows] = (piece / usable).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values, scales


def _pieces(rows: Tensor) -> list[slice]:
    """Slices of rows, small ones on a CPU."""
    limit = _CPU_VALUES if rows.device.type == "cpu" else _GPU_VALUES
    step = max(1, limit // max(rows[:1].numel(), 1))
    return [slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step)]


def _measure(states: Tensor, values: Tensor, scales: Tensor, error: Tensor) -> None:
    """Fill error [..., 2] with the rows' sums of squares of (decoded - given) and of given."""
    for rows in _pieces(states):
        given = states[rows].float()
        off = decode(values[rows], scales[rows]).float() - given
        torch.sum(off.square_(), -1, out=error[rows][..., 0])
        torch.sum(given.square(), -1, out=error[rows][..., 1])
