"""Reference speculative decoding: target and drafter in one process, one stream, a chain of K drafts.

Slow and plain on purpose: it shows what an engine must do, checks that speculation changes no token, and gives an
acceptance length that replay must equal.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from eyas import checkpoint
from eyas.drafter.attention import attend
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.walk import Acceptance
from eyas.engine.local import check_weights, entering, find_decoder, load_model
from eyas.engine.preflight import available_memory
from eyas.errors import TargetError
from eyas.evaluate.accept import accept_greedy, accept_sampled, sample
from eyas.progress import size
from eyas.target import Target


@dataclass(frozen=True)
class Decoded:
    """One answer.

    Attributes:
        token_ids: as emitted, the end-of-turn token included.
        acceptance: counts of its verifications (none for plain decoding).
        wall_s: seconds, prefill included.
    """

    token_ids: list[int]
    acceptance: Acceptance
    wall_s: float


class TargetSession:
    """The target with a key/value cache that can be rolled back."""

    def __init__(self, target: Target, dtype: torch.dtype, device: torch.device, aux_layer_ids: Sequence[int]) -> None:
        self.model = load_model(target, dtype).to(device)
        # Transformers renamed the argument (5.24 warns, 5.40 drops the old name).
        known = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._cuts_logits = "logits_to_keep" in known  # not every checkpoint's own code does
        self.layers = find_decoder(self.model, target).layers
        self.eos = set(target.eos_token_ids)
        self.device, self.aux_layer_ids = device, list(aux_layer_ids)
        self.start()

    def start(self) -> None:
        """Forget the last answer."""
        self.cache = DynamicCache()

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Run the next n tokens; returns logits [n, V] in fp32 and aux hidden states [n, 3H].

        Args:
            last_only: the logits of the last token alone are wanted, [1, V]: those of a prompt of 4,096 tokens take
                2 GB at V 128,256.
        """
        fewer = {"logits_to_keep": 1} if last_only and self._cuts_logits else {}
        with entering(self.layers, self.aux_layer_ids) as entered:
            ids = torch.tensor([list(token_ids)], device=self.device)
            logits = self.model(input_ids=ids, use_cache=True, **{self._cache_name: self.cache}, **fewer).logits[0]
        return (logits[-1:] if last_only else logits).float(), torch.cat(
            [entered[layer][0] for layer in self.aux_layer_ids], dim=-1
        )

    def keep(self, length: int) -> None:
        """Drop all cached positions from `length` on (refused drafts)."""
        refused = self.cache.get_seq_length() - length
        if refused:
            self.cache.crop(-refused)


def why_not(target: Target, dtype: torch.dtype, device: torch.device) -> str:
    """Why the target can't be decoded with in this process: quantised weights, or too little memory; "" where it can.

    The weights pass through host memory on their way to a GPU (`load_model`), so they must find room in both.
    """
    try:
        check_weights(target)
    except TargetError as error:
        return error.seen
    values = 0
    for path in set(target.weight_files.values()):
        with checkpoint.opened(path) as handle:
            values += sum(torch.Size(handle.get_slice(name).get_shape()).numel() for name in handle.keys())  # noqa: SIM118
    needed, free = values * torch.finfo(dtype).bits // 8, {"host": available_memory()}
    if device.type == "cuda":
        free[str(device)] = torch.cuda.mem_get_info(device)[0]
    short = [f"{where} has {size(amount)} free" for where, amount in free.items() if amount < needed]
    return f"its weights take {size(needed)} as {dtype}, and the {' and '.join(short)}" if short else ""


class DrafterSession:
    """The drafter with the step-0 keys and values of all accepted positions."""

    def __init__(self, drafter: Drafter, embedding: Tensor, drafts: int) -> None:
        self.drafter, self.embedding, self.drafts = drafter, embedding, drafts
        self.draft_ids = drafter.draft_ids
        self.start()

    def start(self) -> None:
        """Forget the last answer."""
        attention, like = self.drafter.midlayer.self_attn, self.embedding
        self.keys = like.new_empty(0, attention.kv_heads, attention.head_dim)
        self.values = self.keys.clone()

    @torch.inference_mode()
    def absorb(self, aux: Tensor, next_tokens: Sequence[int]) -> None:
        """Add accepted positions: the target's aux states [n, 3H] and the token that follows each."""
        features = self.drafter.combine(aux.to(self.embedding.dtype))
        cos, sin = self._rope(len(self.keys), len(next_tokens))
        keys, values, _ = self._project(next_tokens, features, cos, sin)
        self.keys, self.values = torch.cat([self.keys, keys]), torch.cat([self.values, values])
        self.last_token, self.last_feature = next_tokens[-1], features[-1:]

    @torch.inference_mode()
    def draft(self, temperature: float, generator: torch.Generator) -> tuple[list[int], Tensor]:
        """K drafts from the newest position, and the distributions they were drawn from.

        Returns: target token ids, and [K, V] probabilities over the target's vocabulary (empty at temperature 0).
        """
        layer = self.drafter.midlayer
        context = torch.arange(len(self.keys), device=self.keys.device)
        window = self.drafter.config.sliding_window or len(self.keys) + self.drafts
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        tokens: list[int] = []
        probs: list[Tensor] = []
        token, feature = self.last_token, self.last_feature
        for step in range(self.drafts):
            position = len(self.keys) - 1 + step
            cos, sin = self._rope(position, 1)
            key, value, query = self._project([token], feature, cos, sin)
            if step > 0:  # the newest position's own key is in the context already
                own_keys.append(key)
                own_values.append(value)
            visible = context[None] > position - window
            feature = layer.finish(feature, attend(query, self.keys, self.values, own_keys, own_values, visible))
            logits = self.drafter.logits(feature)[0]
            feature = self.drafter.feed_back(feature)
            if temperature == 0:
                draft = int(logits.argmax())
            else:
                weights = (logits / temperature).softmax(-1)
                draft = sample(weights, generator)
                probs.append(weights.new_zeros(len(self.embedding)).index_copy(0, self.draft_ids, weights))
            token = int(self.draft_ids[draft])
            tokens.append(token)
        return tokens, torch.stack(probs) if probs else self.embedding.new_empty(0, len(self.embedding))

    def _project(
        self, tokens: Sequence[int], features: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and queries of rows that see these tokens and features."""
        layer, attention = self.drafter.midlayer, self.drafter.midlayer.self_attn
        embeds = self.embedding[torch.tensor(tokens, device=self.embedding.device)]
        embed_query, embed_kv = attention.embed_half(layer.input_layernorm(embeds))
        normed = layer.hidden_norm(features)
        keys, values = attention.key_value(embed_kv, normed, cos, sin)
        return keys, values, attention.query(embed_query, normed, cos, sin)

    def _rope(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + count, device=self.embedding.device)
        return self.drafter.rope(positions, self.embedding)


def decode_plain(
    target: TargetSession, prompt: Sequence[int], max_tokens: int, temperature: float, generator: torch.Generator
) -> Decoded:
    """One token after another, without a drafter: the baseline of time and of truth."""
    started = time.perf_counter()
    target.start()
    emitted: list[int] = []
    feed = list(prompt)
    while len(emitted) < max_tokens and not (emitted and emitted[-1] in target.eos):
        logits, _ = target.forward(feed, last_only=True)
        feed = [_next(logits[-1], temperature, generator)]
        emitted += feed
    return Decoded(emitted, Acceptance.none(0), time.perf_counter() - started)


def decode_speculative(
    target: TargetSession,
    session: DrafterSession,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Decoded:
    """Draft K, verify in one target forward, keep what is accepted. Accepted drafts beyond the answer's end (end of
    turn, max_tokens) are cut and not counted, as in replay."""
    started = time.perf_counter()
    target.start()
    session.start()
    acceptance = Acceptance.none(session.drafts)
    logits, aux = target.forward(prompt, last_only=True)
    emitted = [_next(logits[-1], temperature, generator)]
    known = len(prompt)  # positions whose target states are final
    follows = [*prompt[1:], emitted[0]]
    while len(emitted) < max_tokens and emitted[-1] not in target.eos:
        session.absorb(aux, follows)
        drafts, draft_probs = session.draft(temperature, generator)
        logits, aux = target.forward([emitted[-1], *drafts])
        if temperature == 0:
            accepted, bonus = accept_greedy(drafts, logits)
        else:
            accepted, bonus = accept_sampled(drafts, draft_probs, logits, temperature, generator)
        follows = [*drafts[:accepted], bonus]
        known += len(follows)
        target.keep(known)
        aux = aux[: len(follows)]
        kept = _until_end(follows, target.eos, max_tokens - len(emitted))
        acceptance.add(min(accepted, len(kept)))
        emitted += kept
    return Decoded(emitted, acceptance, time.perf_counter() - started)


def decode_along(
    target: TargetSession, session: DrafterSession, prompt: Sequence[int], answer: Sequence[int]
) -> Acceptance:
    """Speculative decoding of an answer that is given: a draft is accepted where the answer says the same. For number
    types in which two programs write different answers to one prompt."""
    target.start()
    session.start()
    acceptance, generator = Acceptance.none(session.drafts), torch.Generator()
    _, aux = target.forward(prompt, last_only=True)
    follows, at = [*prompt[1:], answer[0]], 1
    while at < len(answer):
        session.absorb(aux, follows)
        drafts, _ = session.draft(0.0, generator)
        accepted = 0
        while accepted < min(len(drafts), len(answer) - at) and drafts[accepted] == answer[at + accepted]:
            accepted += 1
        acceptance.add(accepted)
        follows = list(answer[at : at + accepted + 1])
        _, aux = target.forward([answer[at - 1], *follows[:-1]])
        at += len(follows)
    return acceptance


def _next(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return sample((logits / temperature).softmax(-1), generator)


def _until_end(token_ids: list[int], eos: set[int], room: int) -> list[int]:
    """Tokens up to and with the first end-of-turn token, at most `room`."""
    for i, token in enumerate(token_ids[:room]):
        if token in eos:
            return token_ids[: i + 1]
    return token_ids[:room]
