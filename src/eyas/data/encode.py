"""Rendered text to token ids and loss mask.

A text is cut where the assistant begins to write and the pieces are encoded one by one, as at serving time: the prompt
is encoded whole and the answer's tokens follow it. So no token straddles a span, and no character offsets are needed
(tokenizers trim and normalise them). A span's last token is found by counting special tokens, which never merge.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.data.records import Rejected
from eyas.data.render import Rendered
from eyas.data.tokens import LossMask, TokenIds


class Encoder:
    """A tokenizer with what masks need to know of it.

    Args:
        tokenizer: Transformers tokenizer, fast (Rust) or slow.
        end_ids: more ids that end a turn (the target's eos ids), special or not.

    Attributes:
        added: strings of all added tokens, special or not.
        ends: ids that end a turn.
        special: strings of special tokens, the longest first.
        pattern: finds them in text.
        cuts: whether a text may be encoded in pieces.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int] = ()) -> None:
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        # Kept only where it is needed: to send it to another process takes Transformers and torch along.
        self._slow: Any = tokenizer if self._fast is None else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items()}
        own_end = tokenizer.eos_token_id
        self.ends = frozenset([*end_ids, *([] if own_end is None else [own_end])])
        self.added = {token.content for token in added.values()}
        ids = {index for index, token in added.items() if token.special} | {i for i in self.ends if i in added}
        self.special = sorted((added[index].content for index in ids), key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, self.special)) or r"(?!)")
        self._is_special: npt.NDArray[np.bool_] = np.zeros(max(len(tokenizer), *ids, 0) + 1, dtype=np.bool_)
        self._is_special[list(ids)] = True
        self.cuts = self._safe_to_cut()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        if not texts:
            return []
        if self._fast is not None:
            # encode_batch_fast leaves out the offsets, yet took 1.4 times as long on such pieces (tokenizers 0.23).
            return [encoding.ids for encoding in self._fast.encode_batch(list(texts), add_special_tokens=False)]
        return [self._slow.encode(text, add_special_tokens=False) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=False))
        return str(self._slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_rendered(self, batch: Sequence[Rendered]) -> list[tuple[TokenIds, LossMask] | Rejected]:
        """Token ids int32 [T] and loss mask bool [T] of each text, or why it has none."""
        cuts = [_cut(rendered, self.pattern) for rendered in batch]
        try:
            encoded = iter(self.encode([piece for pieces in cuts for piece, _ in pieces]))
        except (UnicodeEncodeError, TypeError):
            if len(batch) == 1:
                return [Rejected("lone_surrogate", "half of a UTF-16 pair, which no tokenizer takes")]
            return [result for rendered in batch for result in self.encode_rendered([rendered])]
        results: list[tuple[TokenIds, LossMask] | Rejected] = []
        for rendered, pieces in zip(batch, cuts, strict=True):
            results.append(self._assemble(rendered, [(next(encoded), specials) for _, specials in pieces]))
        return results

    def _assemble(
        self, rendered: Rendered, pieces: list[tuple[list[int], int | None]]
    ) -> tuple[TokenIds, LossMask] | Rejected:
        arrays, masks = [], []
        for ids, specials in pieces:
            array = np.array(ids, dtype=np.int32)
            mask = np.zeros(len(array), dtype=np.bool_)
            if specials == 0:
                mask[:] = True
            elif specials is not None:
                places = np.flatnonzero(self._is_special[array])
                if len(places) < specials:
                    return Rejected(
                        "end_of_turn_not_a_token", f"{specials} special tokens in text, {len(places)} in ids"
                    )
                mask[: places[specials - 1] + 1] = True
            arrays.append(array)
            masks.append(mask)
        token_ids, loss_mask = np.concatenate(arrays), np.concatenate(masks)
        if not self.cuts:
            whole = np.array(self.encode([rendered.text])[0], dtype=np.int32)
            if not np.array_equal(whole, token_ids):
                return self._by_prefixes(rendered, whole)
        return token_ids, loss_mask

    def _by_prefixes(self, rendered: Rendered, whole: TokenIds) -> tuple[TokenIds, LossMask] | Rejected:
        """Mask over the whole text's ids, for tokenizers that mark a text's beginning (SentencePiece's "▁")."""
        mask = np.zeros(len(whole), dtype=np.bool_)
        for start, end in rendered.spans:
            head, tail = self.encode([rendered.text[:start], rendered.text[:end]])
            if whole[: len(tail)].tolist() != tail or tail[: len(head)] != head:
                return Rejected("token_across_turns", f"a token straddles character {start} or {end}")
            mask[len(head) : len(tail)] = True
        return whole, mask

    def _safe_to_cut(self) -> bool:
        """Whether a piece is encoded alike alone and after a line end."""
        whole, head, tail = self.encode([":\nx", ":\n", "x"])
        return whole == head + tail


def _cut(rendered: Rendered, pattern: re.Pattern[str]) -> list[tuple[str, int | None]]:
    """Pieces of the text; for one that a span starts: how many special tokens it takes to the span's end, 0 where the
    span has no end-of-turn token and so is a piece of its own; None for text between spans."""
    pieces: list[tuple[str, int | None]] = []
    position, specials = 0, None
    for start, end in rendered.spans:
        pieces.append((rendered.text[position:start], specials))
        found = pattern.findall(rendered.text, start, end)
        if found and rendered.text.endswith(found[-1], start, end):
            position, specials = start, len(found)
        else:
            pieces.append((rendered.text[start:end], 0))
            position, specials = end, None
    pieces.append((rendered.text[position:], specials))
    return [piece for piece in pieces if piece[0]]
