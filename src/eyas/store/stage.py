"""The stage `verify`: the whole store, before anything is trained from it."""

from eyas import fs
from eyas.errors import VerificationFailed
from eyas.record import Inputs
from eyas.run import Run
from eyas.stages import Result
from eyas.store.reader import StoreReader
from eyas.store.verify import Report, verify_store

RECAPTURE_FILE = "recapture.json"
_FAULTS_SHOWN = 20


def inputs(run: Run) -> Inputs:
    return {"store": StoreReader(run.store_url).digest}


def execute(run: Run) -> Result:
    """Raises: VerificationFailed where anything is wrong or a sample is neither written nor rejected."""
    report = verify_store(run.store_url, logs_dir=run.logs_dir)
    raise_faults(run, report)
    counts = {"samples": report.written, "rejected": report.rejected, "checked": report.checked}
    return Result(report.digest, counts)


def raise_faults(run: Run, report: Report) -> None:
    """Raises: VerificationFailed naming what is wrong; the ids to capture again go to logs/recapture.json."""
    if report.faults:
        listing = run.logs_dir / RECAPTURE_FILE
        fs.write_json(listing, {"shards": report.bad_shards, "samples": report.recapture})
        shown = "\n  ".join(str(fault) for fault in report.faults[:_FAULTS_SHOWN])
        more = len(report.faults) - _FAULTS_SHOWN
        again, repair = run.command("capture"), run.command("verify", "--repair")
        raise VerificationFailed(
            f"{run.store_url}: {len(report.faults)} faults\n  {shown}" + (f"\n  and {more} more" if more > 0 else ""),
            expected=f"what was captured; {len(report.recapture)} samples in {len(report.bad_shards)} shards "
            f"are to be captured again ({listing})",
            cause="a damaged disk or copy, or files edited or moved by hand",
            next=f"{repair}   # drops those shards; then {again} makes just them again",
        )
    if report.pending:
        raise VerificationFailed(
            f"{run.store_url}: {report.pending:,} samples are neither written nor rejected",
            expected="samples in = written + rejected",
            cause="capture was stopped, or bad shards were dropped",
            next=f"{run.command('capture')}   # goes on where it was",
        )
