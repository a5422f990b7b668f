"""What the tap tells the outside: one JSON line an event, appended to the file that the settings name.

{"t": unix time, "pid": ..., "rank": tensor-parallel rank or -1, "event": ..., more}. Events, in the order of a start:
    plugin    registered; "role" is "scheduler" in the processes that run the model, "other" elsewhere
    weights   the model is loaded; "model" is its class
    layers    auxiliary layers are set and read back; "setter", "passed", "read"; where SGLang sets them by itself,
              only at its first forward pass and only of the rank that sends
    ring      attached by the rank that sends; "pinned" says whether it is registered with CUDA
    fired     the first rows were taken; "rows", "rid"
    dropped   rows had no room, or could not be taken; "why", "rows"; once for each stretch of them
    flowing   rows have room again; "dropped_rows" in all
    refused   "seen", "expected", "cause": states would be wrong here; the process ends
"""

import json
import os
import time


class Refused(RuntimeError):
    """This engine, model or layout would give wrong states.

    Args:
        seen, expected, cause: as in Eyas's own errors.
    """

    def __init__(self, seen: str, expected: str, cause: str) -> None:
        super().__init__(f"eyas: {seen}; expected: {expected}; {cause}")
        self.seen, self.expected, self.cause = seen, expected, cause


class Events:
    """The events file of one server; all its processes append to it."""

    def __init__(self, path: str, rank: int = -1) -> None:
        self.path, self.rank = path, rank

    def write(self, event: str, **more: object) -> None:
        line = {"t": time.time(), "pid": os.getpid(), "rank": self.rank, "event": event, **more}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())  # one write: lines of processes don't mix
        finally:
            os.close(descriptor)

    def refuse(self, refused: Refused) -> None:
        self.write("refused", seen=refused.seen, expected=refused.expected, cause=refused.cause)
