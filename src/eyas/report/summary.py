"""The table that `eyas run` ends with."""

from pathlib import Path

from eyas.report.facts import Facts, gather
from eyas.report.page import conditions, save_page
from eyas.report.serving import engine_name, headline
from eyas.run import Run

_OPEN = "not finished"


def finish(run: Run) -> None:
    """Write the report, and print what the run came to on standard output: its result, not its progress."""
    facts = gather(run)
    rows = [("run", run.dir.name), *summary_rows(facts, save_page(facts))]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:{width}}  {value}" for name, value in rows))


def summary_rows(facts: Facts, report: Path) -> list[tuple[str, str]]:
    """Name and value of each line of the table."""
    store, speed, length = facts.store, facts.train_tokens_per_s, facts.acceptance_length
    evaluation = facts.evaluation or {}
    shares = evaluation.get("acceptance_per_position") or []
    rows = [
        ("tokens captured", f"{store.tokens:,} in {store.samples:,} samples" if store else _OPEN),
        ("bytes per token", f"{store.bytes_per_token:,.0f}" if store else _OPEN),
        ("training tokens/s", f"{speed:,.0f}" if speed is not None else _OPEN),
        ("acceptance length", f"{length:.3f} ({conditions(facts)})" if length is not None else _OPEN),
    ]
    if shares:
        rows.append(("acceptance by position", ", ".join(f"{share:.1%}" for share in shares)))
    if facts.speedup is not None:
        rows.append(("speed-up", f"{facts.speedup:.2f} times plain decoding, in process"))
    served = headline(facts)
    if facts.serving and served:
        rows.append((f"in {engine_name(facts.serving)}", f"{served[1]:.2f} times the target alone, {served[0]}"))
    return [*rows, ("report", str(report))]
