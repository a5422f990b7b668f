"""What a run needs before it is started: tokens, bytes, disk and hours, and what is missing.

Counts come from `prepare` where it has run, else from the sources' budgets, else from what the user says.
"""

import contextlib
import shlex
from pathlib import Path

from eyas import fs
from eyas.data.presets import PRESETS
from eyas.data.read import source_files
from eyas.engine.preflight import Facts, faults
from eyas.engine.ring import SHM
from eyas.errors import DataError, EyasError, RecipeError, StoreFull, TargetError
from eyas.need import Need, both_units, counted, room
from eyas.run import Run
from eyas.settings import Source
from eyas.target import load_target

# Share of supervised tokens where prepare has not counted it: between one-answer chats (0.7) and long prompts (0.4).
_ASSUMED_SHARE = 0.6


def find_need(run: Run, *, tokens: int, share: float, hidden_size: int) -> Need:
    """Numbers given by the user go first (0: not given), then what prepare counted, then budgets and the target.

    Raises: RecipeError naming the option that says what can't be known yet.
    """
    counts = counted(run)
    budgets = [source.budget_tokens for source in run.recipe.data.sources]
    if tokens:
        tokens_from = "--tokens"
    elif counts:
        tokens, tokens_from = counts["tokens"], "counted by prepare"
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
    if not share and counts:
        share, share_from = counts["supervised_tokens"] / max(counts["tokens"], 1), "counted by prepare"
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
    lines += _shortfalls(run, ours)
    return lines if run.recipe.engine.kind == "local" else lines + engine_lines(run)


def engine_lines(run: Run) -> list[str]:
    """The server's exact command line, its shared memory, and all that preflight finds missing."""
    facts, lines = Facts(run), []
    with contextlib.suppress(EyasError):  # what is in the way is told by preflight below
        launch, port = facts.launch, run.recipe.engine.port
        engine, profile = f"{launch.kind.title} {launch.version}", launch.profile
        lines.append(f"engine    {engine}, profile {profile.name}: {profile.about}")
        lines.append(f"command   {shlex.join(launch.command(port))}" + ("" if port else "   # port 0: a free one"))
        lines += [f"          {name}={shlex.quote(value)}" for name, value in launch.env.items()]
        if launch.tap:
            lines.append("          PYTHONPATH and EYAS_TAP: a folder of this run, through which the tap gets in")
            ring, free = run.recipe.capture.ring_bytes, fs.free_bytes(SHM)
            lines.append(f"/dev/shm  {both_units(ring)} for the ring (capture.ring_bytes), {both_units(free)} free")
    for error in faults(run):
        if not isinstance(error, StoreFull):  # the disk is in the lines above
            lines.append(f"short:    {error.seen}" + (f"; next: {error.next}" if error.next else ""))
    return lines


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
    found, store = room(run, store_bytes), run.recipe.store
    if found is None:
        return [f"disk      {run.store_url}: room there is not checked"]
    lines = [f"disk      {both_units(found.free_bytes)} free at {found.folder}"]
    if found.lacking_bytes:
        lacking = both_units(found.lacking_bytes)
        lines.append(f"short:    disk, by {lacking} (store.min_free_bytes included); fp8 or another store.url helps")
    if found.over_budget_bytes:
        over = both_units(found.over_budget_bytes)
        lines.append(f"short:    store.max_bytes = {both_units(store.max_bytes)}, by {over}")
    return lines
