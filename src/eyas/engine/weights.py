"""Weight files as a server will read them: all there and whole, whatever number types or packing they hold."""

import json
import struct
from pathlib import Path
from typing import Any

from eyas.errors import TargetError
from eyas.target import Target

_HEADER_LIMIT = 100 << 20


def check_weight_files(target: Target) -> None:
    """Every weight file is there, whole, and holds the tensors that the index says.

    Only headers are read: 64 files of a 1 TB checkpoint take a second.
    Raises: TargetError.
    """
    tensors: dict[Path, list[str]] = {}
    for tensor, path in target.weight_files.items():
        tensors.setdefault(path, []).append(tensor)
    for path, names in sorted(tensors.items()):
        header = read_header(path)
        missing = sorted(set(names) - set(header))
        if missing:
            raise TargetError(
                f"{path}: {len(missing)} tensors that the index places there are missing, the first is {missing[0]}",
                cause="the index and the weight files are of different downloads",
                next="fetch the folder again; nothing of the run is lost",
            )


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, checked against the file's size.

    Raises: TargetError where the file can't be read, is cut, or is none.
    """
    try:
        length = path.stat().st_size
        with path.open("rb") as handle:
            start = handle.read(8)
            count = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            header = dict(json.loads(handle.read(count))) if 0 < count <= min(length, _HEADER_LIMIT) else {}
    except OSError as error:
        raise TargetError(
            f"{path}: can't be read: {error.strerror}",
            cause="the user that runs Eyas may not read the model",
            next=f"ls -l {path}",
        ) from None
    except ValueError:
        header = {}
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + count + max((entry["data_offsets"][1] for entry in entries), default=0)
    if not entries or whole != length:
        raise TargetError(
            f"{path}: {length:,} bytes" + (f"; its header says {whole:,}" if entries else ", no safetensors header"),
            expected="a whole safetensors file",
            cause="the download or copy was cut short, or only a Git LFS pointer was fetched",
            next="fetch the file again; nothing of the run is lost",
        )
    return header
