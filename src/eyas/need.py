"""What a run's hidden states need: tokens, bytes, and the room there is for them."""

import json
from dataclasses import dataclass
from pathlib import Path

from eyas import fs
from eyas.progress import scaled
from eyas.run import Run


@dataclass(frozen=True)
class Need:
    """What is to be captured.

    Attributes:
        tokens: how many, and `tokens_from` says where that number comes from.
        share: supervised tokens / tokens, and `share_from` says where that comes from.
        hidden_size: H of the target.
    """

    tokens: int
    tokens_from: str
    share: float
    share_from: str
    hidden_size: int

    def store_bytes(self, encoding: str, final_encoding: str) -> float:
        """Aux states of three layers for every token, the final state of supervised ones, and 5 bytes of id and mask.

        bf16: 6H + 2fH; fp8: 3H + 12 (scales) + 2fH; fp8 final states too: 3H + 12 + f(H + 4).
        """
        h, f = self.hidden_size, self.share
        aux = 6 * h if encoding == "bf16" else 3 * h + 12
        final = 2 * h if final_encoding == "bf16" else h + 4
        return self.tokens * (aux + f * final + 5)

    def four_states_bytes(self) -> int:
        """Four bf16 states for every token, as other tools keep them: 8H a token."""
        return self.tokens * 8 * self.hidden_size


def counted(run: Run) -> dict[str, int]:
    """What `prepare` counted, `tokens` and `supervised_tokens` among it; empty before it ran."""
    manifest = run.tokens_dir / "manifest.json"
    return dict(json.loads(manifest.read_text(encoding="utf-8"))) if manifest.is_file() else {}


@dataclass(frozen=True)
class Room:
    """Room at the store's place.

    Attributes:
        folder: the nearest folder that exists.
        free_bytes: free there, `store.min_free_bytes` not subtracted.
        lacking_bytes: what the disk lacks for the rest of the store; 0 where it fits.
        over_budget_bytes: what `store.max_bytes` lacks; 0 where it fits or no budget is set.
    """

    folder: Path
    free_bytes: int
    lacking_bytes: float
    over_budget_bytes: float


def room(run: Run, store_bytes: float) -> Room | None:
    """Room for a store of so many bytes, those that are there already counted in; None for a store elsewhere."""
    if "://" in run.store_url:
        return None
    table, place = run.recipe.store, Path(run.store_url)
    folder = next(path for path in (place, *place.parents) if path.exists())
    present = sum(path.stat().st_size for path in place.rglob("*.safetensors")) if folder == place else 0
    free = fs.free_bytes(folder)
    lacking = max(0.0, store_bytes - present - free + table.min_free_bytes) if store_bytes > present else 0.0
    over = max(0.0, store_bytes - table.max_bytes) if table.max_bytes else 0.0
    return Room(folder, free, lacking, over)


def both_units(amount: float) -> str:
    """Decimal and binary: 5.034e12 -> "5.03 TB (4.58 TiB)"."""
    (decimal, of_1000), (binary, of_1024) = scaled(amount, 1000, _DECIMAL), scaled(amount, 1024, _BINARY)
    return f"{decimal:.2f} {of_1000} ({binary:.2f} {of_1024})"


_DECIMAL, _BINARY = ("B", "kB", "MB", "GB", "TB", "PB"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
