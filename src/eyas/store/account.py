"""What a store holds, in figures: samples in = written + rejected + pending, tokens, bytes, errors, vocabulary."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.store.format import AUX_LAYERS
from eyas.store.reader import StoreReader

VOCAB_SIZES = (4_096, 8_192, 16_384, 32_768)


def account(store: StoreReader) -> dict[str, Any]:
    """The figures of `eyas store info`, JSON-able.

    Returns: samples {in, written, rejected {reason: n}, pending}; tokens and supervised_tokens (written); sources, one
        {source, in, written, rejected, pending, tokens, supervised_tokens} each; bytes_per_token by tensor, with their
        sum as `total`; relative_error by kind of state (fp8 only); vocabulary, as `coverage_table`.
    """
    rows = store.rows
    planned = store.plan.table.group_by("source", use_threads=False).aggregate([("sample_id", "count")])
    written, source = rows.equal("rejected", ""), np.array(rows.table["source"].to_pylist(), dtype=object)
    sources = []
    for name, count in sorted(zip(*(planned[column].to_pylist() for column in planned.column_names), strict=True)):
        mine = source == name
        done, kept = int(mine.sum()), mine & written
        sources.append(
            {
                "source": name,
                "in": count,
                "written": int(kept.sum()),
                "rejected": done - int(kept.sum()),
                "pending": count - done,
                "tokens": int(rows.tokens[kept].sum()),
                "supervised_tokens": int(rows.supervised[kept].sum()),
            }
        )
    reasons = Counter(reason for reason in rows.table["rejected"].to_pylist() if reason)
    return {
        "samples": {
            "in": len(store.plan),
            "written": int(written.sum()),
            "rejected": dict(sorted(reasons.items())),
            "pending": len(store.plan) - len(rows),
        },
        "tokens": int(rows.tokens[written].sum()),
        "supervised_tokens": int(rows.supervised[written].sum()),
        "sources": sources,
        "bytes_per_token": bytes_per_token(store),
        "relative_error": relative_error(store),
        "vocabulary": coverage_table(store.token_counts("train")),
    }


def bytes_per_token(store: StoreReader) -> dict[str, float]:
    """Bytes of each tensor for a token of the plan; those of final states for a token at its supervised share."""
    tokens, supervised = int(store.plan.tokens.sum()), int(store.plan.supervised.sum())
    sizes = {t.name: t.row_bytes * (supervised if t.supervised else tokens) / tokens for t in store.tensors}
    return sizes | {"total": sum(sizes.values())}


def relative_error(store: StoreReader) -> dict[str, list[float]]:
    """Kind of state -> |decoded - given| / |given| of each layer, the root mean square over samples by their tokens."""
    found = {}
    for kind, layers in (("aux", AUX_LAYERS), ("final", 1)):
        column, weight = f"{kind}_error", store.rows.tokens if kind == "aux" else store.rows.supervised
        if column in store.rows.table.schema.names and weight.sum():
            errors = np.array(store.rows.table[column].to_pylist(), dtype=np.float64).reshape(-1, layers)
            kept = store.rows.equal("rejected", "")
            found[kind] = np.sqrt(np.average(errors[kept] ** 2, axis=0, weights=weight[kept])).tolist()
    return found


def coverage_table(counts: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    """What share of the supervised tokens a draft vocabulary of each size would hold, without capturing again.

    Args:
        counts: of supervised training tokens, int64 [vocab].
    Returns: one {size, coverage, rarest} for 4k, 8k, 16k, 32k and the full vocabulary; `rarest` is the count of the
        rarest token in it, 0 where it is larger than the number of tokens ever seen.
    """
    ranked, total = np.sort(counts)[::-1], int(counts.sum())
    sizes = [*(size for size in VOCAB_SIZES if size < len(counts)), len(counts)]
    return [
        {
            "size": size,
            "coverage": float(ranked[:size].sum() / total) if total else 0.0,
            "rarest": int(ranked[size - 1]),
        }
        for size in sizes
    ]
