"""What a run needs before it is started: tokens, bytes, disk and hours, and what is missing.

Counts come from `prepare` where it has run, else from the sources' budgets, else from what the user says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from eyas import fs
from eyas.data.presets import PRESETS
from eyas.data.read import source_files
from eyas.data.tokens import MANIFEST
from eyas.errors import DataError, RecipeError, TargetError
from eyas.run import Run
from eyas.settings import Source
from eyas.target import load_target

# Share of supervised tokens where prepare has not counted it: between one-answer chats (0.7) and long prompts (0.4).
_ASSUMED_SHARE = 0.6


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


def find_need(run: Run, *, tokens: int, share: float, hidden_size: int) -> Need:
    """Numbers given by the user go first (0: not given), then what prepare counted, then budgets and the target.

    Raises: RecipeError naming the option that says what can't be known yet.
    """
    manifest = run.tokens_dir / MANIFEST
    counted = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    budgets = [source.budget_tokens for source in run.recipe.data.sources]
    if tokens:
        tokens_from = "--tokens"
    elif counted:
        tokens, tokens_from = counted["tokens"], "counted by prepare"
    elif any(budgets):
        uncounted = budgets.count(0)
        tokens, tokens_from = sum(budgets), "the sources' budgets"
        tokens_from += f"; {uncounted} without one not counted" if uncounted else ""
    else:
        raise RecipeError(
            "the number of tokens is not known yet",
            cause="prepare has not run, and no source has budget_tokens",
            next=f"{run.command('prepare')}   # counts them; or say --tokens N",
        )
    share_from = "--share"
    if not share and counted:
        share, share_from = counted["supervised_tokens"] / max(counted["tokens"], 1), "counted by prepare"
    elif not share:
        share, share_from = _ASSUMED_SHARE, "assumed; prepare counts it"
    return Need(tokens, tokens_from, share, share_from, hidden_size or _hidden_size(run))


def _hidden_size(run: Run) -> int:
    try:
        return load_target(run.recipe.target).hidden_size
    except TargetError as error:
        raise RecipeError(
            f"the target's hidden size is not known: {error.seen}", next="fetch the target, or say --hidden-size N"
        ) from None


def plan_lines(run: Run, need: Need, rate: float) -> list[str]:
    """The plan, for people; shortfalls come last and start with `short:`."""
    store, sources = run.recipe.store, run.recipe.data.sources
    ours = need.store_bytes(store.encoding, store.final_encoding)
    other = "fp8" if store.encoding == "bf16" else "bf16"
    lines = [f"data      {len(sources)} sources", *(f"          {_source_line(source)}" for source in sources)]
    lines += [
        f"tokens    {need.tokens:,} ({need.tokens_from}), {need.share:.2f} of them supervised ({need.share_from})",
        f"store     {both_units(ours)} in {store.encoding}, {ours / max(need.tokens, 1):,.0f} bytes a token",
        f"          {both_units(need.store_bytes(other, store.final_encoding))} if store.encoding were {other}",
        f"          {both_units(need.four_states_bytes())} as four bf16 states a token, as other tools keep them",
    ]
    if rate:
        lines.append(f"capture   {need.tokens / rate / 3600:,.1f} hours at {rate:,.0f} tokens/s (--rate)")
    else:
        lines.append("capture   say --rate TOKENS_PER_S for hours; `eyas run --limit 50` measures yours")
    return lines + _shortfalls(run, ours)


def _source_line(source: Source) -> str:
    """One source: where it lies, and how much of it is taken."""
    taken = f"up to {source.budget_tokens:,} tokens" if source.budget_tokens else "all of it"
    if source.preset and not source.path:
        preset = PRESETS[source.preset]
        return f"{source.name or source.preset}: from the hub, {preset.repo} ({preset.about}); {taken}"
    try:
        files = source_files(source.path)
    except DataError:
        return f"{source.name or source.path}: missing, no file at {source.path}; {taken}"
    amount = sum(path.stat().st_size for path in files)
    return f"{source.name or Path(source.path).name}: {len(files)} files, {both_units(amount)}; {taken}"


def _shortfalls(run: Run, store_bytes: float) -> list[str]:
    if "://" in run.store_url:
        return [f"disk      {run.store_url}: room there is not checked"]
    folder = next(path for path in (Path(run.store_url), *Path(run.store_url).parents) if path.exists())
    free, floor, budget = fs.free_bytes(folder), run.recipe.store.min_free_bytes, run.recipe.store.max_bytes
    lines = [f"disk      {both_units(free)} free at {folder}"]
    if store_bytes > free - floor:
        lacking = both_units(store_bytes - free + floor)
        lines.append(f"short:    disk, by {lacking} (store.min_free_bytes included); fp8 or another store.url helps")
    if budget and store_bytes > budget:
        lines.append(f"short:    store.max_bytes = {both_units(budget)}, by {both_units(store_bytes - budget)}")
    return lines


def both_units(amount: float) -> str:
    """Decimal and binary: 5.034e12 -> "5.03 TB (4.58 TiB)"."""
    return f"{_scaled(amount, 1000, ('B', 'kB', 'MB', 'GB', 'TB', 'PB'))} ({_scaled(amount, 1024, _BINARY)})"


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _scaled(amount: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while amount >= base and power < len(units) - 1:
        amount, power = amount / base, power + 1
    return f"{amount:.2f} {units[power]}"
