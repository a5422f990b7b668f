"""A server's ring as it is opened on this side: what stands in the way is told with its next step."""

from pathlib import Path

from eyas.errors import EngineError
from eyas.tap.reader import RingReader
from eyas.tap.ring import RingError

SHM = Path("/dev/shm")  # where rings lie


def open_ring(path: str, stop: str) -> RingReader:
    """The ring, mapped.

    Args:
        stop: the command that ends its server.
    Raises: EngineError where it is gone, or is no ring.
    """
    try:
        return RingReader.attach(path)
    except (OSError, RingError) as error:
        raise EngineError(
            f"{path}: {error}",
            expected="the ring that the server writes to",
            cause="it was removed while the server runs; logind does that at a user's last logout (docs/serve.md)",
            next=f"{stop}   # then the same command",
        ) from None


def read_from(ring: RingReader) -> None:
    """Become the ring's reader.

    Raises: EngineError where another process is it, or the file is gone.
    """
    try:
        ring.open()
    except (OSError, RingError) as error:
        raise EngineError(
            f"{ring.path}: {error}",
            expected="a ring that nobody else reads",
            cause="another eyas captures from the same server, into another store perhaps",
            next="wait until it has ended, then the same command",
        ) from None
