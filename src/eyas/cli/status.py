"""`eyas status`: what is finished, what is going on, what went wrong last."""

import time

from eyas.cli.options import Limit, Overrides, RecipePath, read_run


def status(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0) -> None:
    """Say stage, rate, ETA, disk left and the last error of a run."""
    from eyas.fs import free_bytes
    from eyas.need import room
    from eyas.progress import duration, read_status, size
    from eyas.record import load_record
    from eyas.stages import last_error, stages_of

    run = read_run(recipe, set_, limit)
    print(f"run        {run.dir}")
    for name in stages_of(run):
        record = load_record(run.dir, name)
        print(f"{name:10} " + (f"done {record.finished}, {duration(record.duration_s)}" if record else "not finished"))
    now = read_status(run.logs_dir)
    if now is not None:
        age_s = time.time() - now["updated"]
        eta = f", {duration(now['eta_s'])} left" if now["eta_s"] and now["done"] < now["total"] else ""
        note = f", {now['note']}" if now["note"] else ""
        done = f"{now['done']:,.0f} of {now['total']:,.0f} {now['unit']}, {now['rate']:,.1f}/s"
        print(f"last seen  {now['stage']}: {done}{eta}{note} ({duration(age_s)} ago)")
    folder = next(path for path in (run.dir, *run.dir.parents) if path.exists())
    stored = room(run, 0)
    places = {folder: free_bytes(folder)} | ({stored.folder: stored.free_bytes} if stored else {})
    for place in places if len({place.stat().st_dev for place in places}) > 1 else [folder]:
        print(f"disk left  {size(places[place])} at {place}")
    error = last_error(run)
    if error is not None:
        print(f"last error, {error['stage']}, {duration(time.time() - error['time'])} ago:\n{error['error']}")
