"""The stage `verify`: the whole store, before anything is trained from it."""

from eyas import fs
from eyas.errors import VerificationFailed
from eyas.record import Inputs, record_path
from eyas.run import Run
from eyas.stages import Result
from eyas.store.reader import StoreReader
from eyas.store.verify import Report, repair_store, verify_store

RECAPTURE_FILE = "recapture.json"
_FAULTS_SHOWN = 20


def inputs(run: Run) -> Inputs:
    return {"store": StoreReader(run.store_url).digest}


def execute(run: Run) -> Result:
    """Raises: VerificationFailed where anything is wrong or a sample is neither written nor rejected."""
    report = verify_store(run.store_url, logs_dir=run.logs_dir)
    raise_faults(run.store_url, report, run)
    counts = {"samples": report.written, "rejected": report.rejected, "checked": report.checked}
    return Result(report.digest, counts)


def raise_faults(url: str, report: Report, run: Run | None) -> None:
    """Raises: VerificationFailed naming what is wrong and what to capture again.

    All ids to capture again go to the run's logs/recapture.json.
    """
    command = run.command if run else lambda stage, *options: " ".join(["eyas", stage, "RECIPE", *options])
    again, repair_ = command("capture"), command("verify", "--repair")
    if run is not None and not run.has_own_store:
        again = f"the same `eyas store import ... {url}`"
    if report.faults:
        shown = "\n  ".join(str(fault) for fault in report.faults[:_FAULTS_SHOWN])
        more = f"\n  and {len(report.faults) - _FAULTS_SHOWN} more" if len(report.faults) > _FAULTS_SHOWN else ""
        listed = ""
        if run is not None:
            listing = run.logs_dir / RECAPTURE_FILE
            fs.write_json(listing, {"shards": report.bad_shards, "samples": report.recapture})
            listed = f" ({listing})"
        shards = ", ".join(f"{shard:06d}" for shard in report.bad_shards) or "none"
        raise VerificationFailed(
            f"{url}: {len(report.faults)} faults\n  {shown}{more}\n"
            f"to capture again: {len(report.recapture)} samples{listed} in these shards: {shards}",
            expected="what was captured, byte for byte",
            cause="a damaged disk or copy, or files edited or moved by hand",
            next=f"{repair_}   # drops those shards; then {again} makes just them again",
        )
    if report.pending:
        raise VerificationFailed(
            f"{url}: {report.pending:,} samples are neither written nor rejected",
            expected="samples in = written + rejected",
            cause="capture was stopped, or bad shards were dropped",
            next=f"{again}   # goes on where it was",
        )


def repair(url: str, report: Report, run: Run | None) -> None:
    """Drop what is bad. The records of capture and verify go first: they would prove what is no longer there."""
    if run is not None and (report.faults or report.pending):
        for stage in ("verify", "capture"):
            fs.remove(record_path(run.dir, stage))
    if report.faults:
        repair_store(url, report)
