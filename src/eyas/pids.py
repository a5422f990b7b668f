"""Whether a process that was noted still runs: pids are used again, creation times tell them apart."""

import psutil


def alive(pid: int, created: float) -> bool:
    """Whether this very process still runs.

    Args:
        created: its creation time, as psutil tells it, unix seconds.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and began(process, created)
    except psutil.NoSuchProcess:
        return False


def began(process: psutil.Process, created: float) -> bool:
    """Whether a process is the one of that creation time. Raises: psutil.NoSuchProcess where it is gone."""
    # psutil counts from the boot time, which a clock that is set may shift by a little.
    return bool(abs(process.create_time() - created) < 2)
