"""Each Triton kernel against its plain form in fp64: `make test-gpu`.

Without a GPU, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py`, with triton 3.6 and numpy
before 2.3 installed.
Allowed is a relative error of 2e-6 for fp32 inputs and of 4e-3 for bf16 ones, one rounding to 8 bits.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from eyas.drafter import ops
from eyas.drafter.kernels import gate, heads, merge, norm
from eyas.train import cross_entropy_kernel, fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
ROWS = 7 if INTERPRETED else 301


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    """The same values in fp64, to be differentiated."""
    return [tensor.double().requires_grad_() for tensor in tensors]


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "") -> None:
    error = (found.double() - exact.double()).norm() / exact.double().norm()
    assert error <= ALLOWED[dtype], f"{what}: {error:.2e}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 576] if INTERPRETED else [576, 4096, 7168])
@pytest.mark.parametrize("picks", ["some", "all", "none"])
def test_add_and_two_norms(dtype: torch.dtype, width: int, picks: str) -> None:
    x, y = random(ROWS, width, dtype=dtype), random(ROWS, width, dtype=dtype)
    weight, picked_weight = random(width), random(width)
    rows = torch.arange(ROWS, device=DEVICE)[{"some": slice(1, None, 3), "all": slice(None), "none": slice(0)}[picks]]
    place = torch.full((ROWS,), -1, device=DEVICE).index_copy_(0, rows, torch.arange(len(rows), device=DEVICE))
    total, normed, picked, scale = norm.forward(
        x, y, weight, picked_weight, None if picks == "all" else place, len(rows), 1e-5
    )
    d_total, d_normed, d_picked = (torch.randn_like(each) for each in (total, normed, picked))
    d_x, d_weight, d_picked_weight = norm.backward(
        d_total, d_normed, d_picked, total, scale, weight, picked_weight, None if picks == "all" else place
    )

    assert_near(total, x.double() + y.double(), dtype)
    exact, w, pw = leaves(total, weight, picked_weight)
    e_normed = F.rms_norm(exact, (width,), w, 1e-5)
    e_picked = F.rms_norm(exact[rows], (width,), pw, 1e-5)
    ((exact * d_total).sum() + (e_normed * d_normed).sum() + (e_picked * d_picked).sum()).backward()
    assert_near(normed, e_normed, dtype, "normed")
    assert_near(d_x, exact.grad, dtype, "d_x")
    assert_near(d_weight, w.grad, torch.float32, "d_weight")
    if picks != "none":
        assert_near(picked, e_picked, dtype, "picked")
        assert_near(d_picked_weight, pw.grad, torch.float32, "d_picked_weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [36, 1536] if INTERPRETED else [1536, 14336, 18432])
def test_gate(dtype: torch.dtype, width: int) -> None:
    gate_up, d_out = random(ROWS, 2 * width, dtype=dtype), random(ROWS, width, dtype=dtype)
    (exact,) = leaves(gate_up)
    out = F.silu(exact[:, :width]) * exact[:, width:]
    (out * d_out).sum().backward()
    assert_near(gate.forward(gate_up), out, dtype)
    assert_near(gate.backward(d_out, gate_up), exact.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 80)] if INTERPRETED else [(9, 3, 64), (32, 8, 128), (64, 8, 192)])
def test_heads_with_the_tokens_share(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    layout = ops.Heads(*shape)
    width, offset = (layout.queries + 2 * layout.keys) * layout.dim, 2
    projected, share = random(ROWS, width, dtype=dtype), random(ROWS + 3, width, dtype=dtype)
    token = torch.arange(ROWS, device=DEVICE) + 3  # the last rows' tokens lie beyond the end
    angle = torch.randn(ROWS, 1, layout.dim // 2, device=DEVICE)
    angles = tuple(torch.cat([each, each], dim=-1).to(dtype) for each in (angle.cos(), angle.sin()))
    inside = token + offset < len(share)

    e_projected, e_share = leaves(projected, share)
    plain = ops.to_heads_plain(e_projected, layout, e_share, 0, token, offset, (angles[0].double(), angles[1].double()))
    grads = [torch.randn_like(each, dtype=dtype) * inside[:, None, None] for each in plain]
    torch.stack([(one * grad).sum() for one, grad in zip(plain, grads, strict=True)]).sum().backward()
    column, d_projected = 0, torch.empty_like(projected)
    d_share = torch.zeros_like(share, dtype=torch.float32)
    for number, (count, grad, exact) in enumerate(zip(layout.counts, grads, plain, strict=True)):
        out = torch.empty_like(grad)
        cos, sin = (None, None) if number == 2 else angles
        heads.forward(projected, column, share, column, token, offset, cos, sin, count, layout.dim, out)
        heads.backward(grad, token, offset, cos, sin, d_projected, column, d_share, column)
        assert_near(out[inside], exact[inside], dtype)
        column += count * layout.dim
    assert_near(d_projected, e_projected.grad, dtype)
    assert_near(d_share, e_share.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 80)] if INTERPRETED else [(9, 3, 64), (32, 8, 128), (64, 8, 192)])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("entries", [1, 6])
def test_merge(dtype: torch.dtype, shape: tuple[int, int, int], spread: bool, entries: int) -> None:
    """Attention over a context of 5 keys, merged, is the softmax over all keys; so are its gradients."""
    query_heads, kv_heads, dim = shape
    rows = torch.arange(ROWS, device=DEVICE)
    place = rows + rows // 3 if spread else None
    at = rows if place is None else place
    size = int(at[-1]) + 1
    queries, grad = random(size, query_heads, dim, dtype=dtype), random(size, query_heads, dim, dtype=dtype)
    keys, values = random(5, kv_heads, dim), random(5, kv_heads, dim)
    own_keys = random(entries, ROWS, kv_heads, dim, dtype=dtype)
    own_values = random(entries, ROWS, kv_heads, dim, dtype=dtype)

    e_queries, e_own_keys, e_own_values = leaves(queries, own_keys, own_values)
    grouped = e_queries[at].unflatten(1, (kv_heads, -1)) * dim**-0.5
    context = torch.einsum("rhgd,nhd->rhgn", grouped, keys.double())
    own = torch.einsum("rhgd,krhd->rhgk", grouped, e_own_keys)
    weights = torch.cat([context, own], dim=-1).softmax(-1)
    exact = torch.einsum("rhgn,nhd->rhgd", weights[..., :5].detach(), values.double())
    exact = exact + torch.einsum("rhgk,krhd->rhgd", weights[..., 5:], e_own_values)

    out, lse = torch.empty_like(queries), torch.empty(query_heads, size, device=DEVICE)
    alone = torch.einsum("rhgn,nhd->rhgd", context.softmax(-1), values.double())
    out[at], lse[:, at] = alone.flatten(1, 2).to(dtype), context.logsumexp(-1).flatten(1).T.float()
    merge.forward(out, lse, queries, own_keys, own_values, place)
    assert_near(out[at], exact.flatten(1, 2), dtype, "out")
    assert_near(lse[:, at], torch.cat([context, own], -1).logsumexp(-1).flatten(1).T, torch.float32, "lse")

    before = random(size, query_heads, dim, dtype=dtype)
    d_queries = before.clone()
    d_keys, d_values = merge.backward(grad, out, lse, queries, own_keys, own_values, place, d_queries)
    wide = grad[at].double().unflatten(1, (kv_heads, -1))
    delta = (wide * out[at].double().unflatten(1, (kv_heads, -1))).sum(-1, keepdim=True)
    d_scores = weights[..., 5:] * (torch.einsum("rhgd,krhd->rhgk", wide, e_own_values) - delta)
    assert_near(d_keys, torch.einsum("rhgk,rhgd->krhd", d_scores, grouped), dtype, "d_keys")
    assert_near(d_values, torch.einsum("rhgk,rhgd->krhd", weights[..., 5:], wide), dtype, "d_values")
    added = torch.einsum("rhgk,krhd->rhgd", d_scores, e_own_keys).flatten(1, 2) * dim**-0.5
    assert_near(d_queries[at], before[at].double() + added, dtype, "d_queries")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [50, 5000] if INTERPRETED else [500, 5000, 32000])
def test_cross_entropy(dtype: torch.dtype, vocab: int) -> None:
    logits, teachers = 3 * random(ROWS, vocab), 2 * random(ROWS, vocab)
    logits, teachers = logits.to(dtype), teachers.to(dtype)
    teacher, weights = torch.randint(ROWS, (ROWS,), device=DEVICE), torch.rand(ROWS, device=DEVICE)
    log_sum = cross_entropy_kernel.log_sum(teachers)
    assert_near(log_sum, teachers.double().logsumexp(-1), torch.float32)
    probs = teachers.double().softmax(-1)[teacher]
    losses, d_logits, drafts = fused.cross_entropy(logits.double(), probs, weights.double())
    found = cross_entropy_kernel.cross_entropy(logits.clone(), teachers, log_sum, teacher, weights)
    assert_near(found[0], losses, torch.float32, "losses")
    assert_near(found[1], d_logits, dtype, "d_logits")
    assert torch.equal(logits.gather(1, found[2][:, None]), logits.gather(1, drafts[:, None]))
