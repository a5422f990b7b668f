"""Files of `torch.save` that strangers made: tensors, lists and numbers are read from them, and no code is run."""

import gzip
import io
import os
import pickle
import threading
from pathlib import Path
from typing import IO, Any, cast

import torch

from eyas import fs
from eyas.store.convert.peer import BadFile

# What torch.load raises on files that are cut, damaged, or hold other things than it allows.
_BAD = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError)


def load(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """The dict in a file, which must have these keys, of tensors or lists of tensors.

    Read by `torch.load(weights_only=True)`: its unpickler builds tensors and plain containers and refuses all else.
    Tensors are mapped, not read, except in .gz files.
    Raises: BadFile.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as handle:
                content = torch.load(io.BytesIO(handle.read()), map_location="cpu", weights_only=True)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _BAD as error:
        detail = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise BadFile(path, "unreadable", detail, expected="a dict of tensors, as torch.save writes it") from None
    missing = [key for key in keys if not isinstance(content, dict) or not _tensors(content.get(key))]
    if missing:
        raise BadFile(path, f"no {', '.join(missing)}", expected=f"a dict with the tensors {', '.join(keys)}")
    return {key: content[key] for key in keys}


def save(path: Path, content: dict[Any, Any], compress: bool = False) -> None:
    """`torch.save` to a file that is whole or absent, gzipped (level 6) where asked."""
    # Another ending than the file's: the tools take every *.pt and *.ckpt for a sample.
    partial = path.with_name(f"{fs.PARTIAL_PREFIX}{os.getpid()}-{threading.get_ident()}-{path.name}.part")
    try:
        # Into handles, for torch.save and gzip write the name of a path into the file.
        with partial.open("wb") as handle:
            if compress:
                with gzip.GzipFile("", "wb", 6, handle, mtime=0) as packed:
                    torch.save(content, cast(IO[bytes], packed))
            else:
                torch.save(content, handle)
        fs.commit_file(partial, path)
    except BaseException:
        fs.remove(partial)
        raise


def _tensors(value: object) -> bool:
    parts = value if isinstance(value, list) and value else [value]
    return all(isinstance(part, torch.Tensor) for part in parts)
