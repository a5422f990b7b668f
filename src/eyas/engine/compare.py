"""How near an engine's states are to what the checkpoint says they should be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.engine.partial import lm_head
from eyas.target import Target

# Cosine that a row must reach. Measured on SmolLM2 in float32: 0.99999 (bf16 rounds the states on their way); on an
# H200 in bf16 against all of Transformers' layers: worst row 0.9983. Neighbouring layers lie at 0.8 to 0.99.
_COSINE = {"float32": 0.999, "bfloat16": 0.99, "float16": 0.99}
_FP8_LOSS = (
    0.01  # e4m3 states lie at 0.9995 of themselves, and at 0.9976 after some layers (worst rows, tiny random model)
)
_QUANTISED_COSINE = 0.98  # the engine rounds activations to fp8 or less where weights are quantised
# Share of rows that must reach it. Where experts are chosen, a row whose choice is a near tie may choose another.
_DENSE_SHARE, _EXPERTS_SHARE = 1.0, 0.9
# The same rows in two batches, through all layers. Rows of another position or request carry other token ids, which is
# seen before; this is for kernels that compute chunks otherwise.
_AGREEMENT = {"float32": 0.99, "bfloat16": 0.97, "float16": 0.97}
_EXPERTS_AGREEMENT = 0.9
_FACTOR = 2.0  # the neighbours must be at least so many times farther away
# Mean |difference| of log-probabilities. fp8 rounds the final states themselves: 0.048 on text with SmolLM2, 0.145 on
# random ids; bf16 0.004 and 0.011.
LOGPROB_LIMIT = {"bf16": 0.05, "fp8": 0.3}
TIE = {"bf16": 0.1, "fp8": 0.5}


@dataclass(frozen=True)
class AuxCheck:
    """One aux layer beside the checkpoint's.

    Attributes:
        layer_id: id i = residual stream after i decoder layers.
        how: what it was compared with.
        median, worst: cosine of its rows; `rows` of them.
        neighbours: layer id -> median cosine, were this that layer.
        fault: why it is not that layer; "" where nothing speaks against it.
        unchecked: why the comparison says nothing; "" where it does.
    """

    layer_id: int
    how: str
    median: float
    worst: float
    rows: int
    neighbours: dict[int, float]
    limit: float
    fault: str = ""
    unchecked: str = ""

    def line(self) -> str:
        beside = ", ".join(f"{value:.5f} as layer {layer_id}" for layer_id, value in sorted(self.neighbours.items()))
        return (
            f"aux layer {self.layer_id}: cosine {self.median:.5f}, worst row {self.worst:.5f} of {self.rows} "
            f"({self.how}); {beside}"
        )


def cosine(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of each row, float64 [T], of two float tensors [T, H]."""
    return torch.cosine_similarity(first.double(), second.double().to(first.device), dim=-1).cpu()


def judge(layer_id: int, how: str, by_layer: dict[int, Tensor], target: Target, limit: float) -> AuxCheck:
    """What cosines of rows say about an aux layer.

    Args:
        by_layer: layer id -> float64 [T]: the rows' cosines, were this that layer; `layer_id` is among them.
        limit: what a row must reach.
    """
    off = {other: float((1 - cosines).mean()) for other, cosines in by_layer.items()}
    own, nearest = by_layer[layer_id], min(off, key=lambda other: off[other])
    medians = {other: float(cosines.median()) for other, cosines in by_layer.items() if other != layer_id}
    fault = unchecked = ""
    if off[layer_id] > _FACTOR * off[nearest]:
        fault = (
            f"the server gives the state after {nearest} layers under id {layer_id}: ids off by {nearest - layer_id}"
        )
    elif not reached(own, target) >= limit:
        fault = f"{float((own < limit).double().mean()):.1%} of the rows are below {limit}"
    else:
        like = [other for other in medians if off[other] < _FACTOR * off[layer_id]]
        if like:
            unchecked = f"aux layers {layer_id} and {like[0]} of this checkpoint are too alike to be told apart"
    return AuxCheck(layer_id, how, float(own.median()), float(own.min()), len(own), medians, limit, fault, unchecked)


def reached(cosines: Tensor, target: Target) -> float:
    """The cosine that all rows reach; nine in ten where the target chooses experts. NaN where one is NaN."""
    return float(cosines.quantile(1 - (_EXPERTS_SHARE if _has_experts(target) else _DENSE_SHARE)))


def cosine_limit(target: Target, dtype: str, encoding: str) -> float:
    """Cosine that a row must reach for an engine that runs in `dtype` and states that come in `encoding`."""
    base = min(_COSINE[dtype], _QUANTISED_COSINE if target.text_config.get("quantization_config") else 1.0)
    base = min(base, _QUANTISED_COSINE if target.config.get("quantization_config") else 1.0)
    return base - (_FP8_LOSS if encoding == "fp8" else 0.0)


def agreement_limit(target: Target, dtype: str) -> float:
    """Cosine that the same row must reach between two batches of an engine that runs in `dtype`."""
    return min(_AGREEMENT[dtype], _EXPERTS_AGREEMENT if _has_experts(target) else 1.0)


def _has_experts(target: Target) -> bool:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return any(target.text_config.get(name) for name in names)


def logprob_error(ours: Tensor, theirs: Tensor) -> float:
    """Mean |difference|; NaN anywhere gives NaN."""
    return float((ours.double() - theirs.double()).abs().mean())


class Head:
    """The target's lm_head, on the CPU.

    Args:
        dtype: what the engine computes in: logits are rounded as the engine rounds them, for at magnitude 32 bfloat16
            is off by up to 0.06.
    Raises: Unchecked where it is quantised; TargetError where there is none.
    """

    def __init__(self, target: Target, dtype: str) -> None:
        self._round = getattr(torch, dtype)
        self._compute = torch.bfloat16 if self._round == torch.bfloat16 else torch.float32
        self._weight = lm_head(target).to(self._round).to(self._compute)

    @torch.inference_mode()
    def logprobs(self, final: Tensor, token_ids: Tensor) -> Tensor:
        """Log-probability of a token after each state: float32 [m] for final states [m, H] and ids [m]."""
        return self._all(final).gather(1, token_ids.long()[:, None])[:, 0]

    @torch.inference_mode()
    def behind(self, final: Tensor, token_id: int) -> float:
        """By how much (log-probability) a token stands behind the best one after a state [H]; 0: it is the best."""
        logprobs = self._all(final[None])[0]
        return float(logprobs.max() - logprobs[token_id])

    def _all(self, final: Tensor) -> Tensor:
        logits = final.to(self._compute) @ self._weight.T
        return logits.to(self._round).float().log_softmax(-1)
