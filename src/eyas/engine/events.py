"""What a server's tap has told: its events file (tap/events.py says which events there are)."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_events(path: Path, **having: str) -> list[Event]:
    """The events that hold these values, in order; a last line that is still being written is left out."""
    if not path.exists():
        return []
    events = [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return [event for event in events if having.items() <= event.items()]


def refusal(path: Path) -> Event | None:
    """Why the tap refused this server, where it did: an event with `seen`, `expected`, `cause`."""
    return next(iter(read_events(path, event="refused")), None)
