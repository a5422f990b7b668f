"""A store on a file system reached through fsspec; tested with S3.

Small files are put in one request each. A shard is built in a staging folder on a local disk and uploaded whole: an
object appears when its upload is complete, never in part. One whose upload broke off stays in the outbox and is sent
first at the next start, so no captured row is lost. Shards that are read are fetched whole, and the last 16 kept.

The staging folder is ~/.cache/eyas/staging/DIGEST, or lies under the folder that EYAS_STAGING names.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import psutil

from eyas import fs
from eyas.errors import StoreError
from eyas.pids import alive
from eyas.progress import say, size
from eyas.store.files import Files
from eyas.store.format import MANIFEST, SHARDS, part_name, shard_name

STAGING = "EYAS_STAGING"
_LOCK = f"{fs.PARTIAL_PREFIX}writer-lock"
_OUTBOX = "outbox"
_PART_FILE = re.compile(rf"{SHARDS}/(\d{{6,}})\.parquet")
_NEW_S = 600  # a folder that gets no lock for so long was left by a killed process
_KEPT_SHARDS = 16  # fetched files kept; above the 8 that a reader maps and the 8 threads of verify
# s3: listings must show what other processes wrote; 4 pieces of 50 MB in flight bound the memory of an upload.
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"use_listings_cache": False, "max_concurrency": 4}}
_LOCAL_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _lives(claim: dict[str, Any]) -> bool:
    """Whether another process of this host that made a claim still runs."""
    return bool(claim["pid"] != os.getpid() and alive(claim["pid"], claim.get("created", 0)))


class RemoteFiles(Files):
    """A store at an fsspec URL. `root` is its staging folder on this machine.

    Raises: StoreError where the URL's scheme is unknown, or the package for it isn't installed.
    """

    remote = True

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        try:
            self._fs, path = fsspec.url_to_fs(url, **_OPTIONS.get(scheme, {}))
        except ImportError as error:
            wanted = "pip install 'eyas[s3]'" if scheme == "s3" else f"install what it names: {error}"
            raise StoreError(f"{url}: no support for `{scheme}://` is installed", next=wanted) from None
        except ValueError as error:
            raise StoreError(
                f"{url}: {error}", expected="a local folder, or a URL that fsspec knows: s3://BUCKET/PATH"
            ) from None
        self._path = path.rstrip("/")
        base = Path(os.environ.get(STAGING) or "~/.cache/eyas/staging").expanduser()
        super().__init__(base / fs.digest(url.rstrip("/")))
        self.where = url.rstrip("/")
        self._errors = _errors(scheme)
        self._claimed = False
        self._manifest_digest: str | None = None
        self._fetched: OrderedDict[str, Path] = OrderedDict()
        self._folder: Path | None = None  # of fetched shards, this process's own
        self._guard = threading.Lock()
        self._fetching: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def create(self) -> None:
        fs.make_folder(self.root / SHARDS)

    def lock(self) -> None:
        """Claim the store with an object in it; a claim that a dead process of this machine left is taken over.

        Raises: StoreError where another process, or one on another machine, holds it.
        """
        fs.make_folder(self.root)
        super().lock()  # among those with the same staging folder; ended by the kernel with the process
        try:
            self._claim()
        except BaseException:
            super().unlock()
            raise

    def unlock(self) -> None:
        if self._claimed:
            self._claimed = False
            self.remove(_LOCK)
        super().unlock()

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for prefix in ("", f"{SHARDS}/"):
            for entry in self._list(prefix):
                name = entry["name"].rstrip("/").rpartition("/")[2]
                if entry["type"] == "file" and not name.startswith("."):
                    found[prefix + name] = int(entry["size"])
        return found

    def others(self) -> list[str] | None:
        names = sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in self._list(""))
        return [name for name in names if not name.startswith(".")] or None

    def sweep(self) -> int:
        """Remove what a killed writer left half-made; send the shards that it finished but couldn't upload."""
        self._send_outbox()
        return fs.sweep_partials(self.root / SHARDS)

    def read(self, name: str) -> bytes:
        with self._telling(f"reading {name}"):
            raw = bytes(self._fs.cat_file(self._remote(name)))
        if name == MANIFEST:
            self._manifest_digest = fs.digest(raw)
        return raw

    def write(self, name: str, data: bytes | str, durable: bool = True) -> None:
        raw = data.encode() if isinstance(data, str) else data
        part = _PART_FILE.fullmatch(name)
        if part and self.stage(shard_name(int(part.group(1)))).exists():
            fs.write_atomic(self._outbox() / Path(name).name, raw)  # `commit` sends it with its shard
            return
        with self._telling(f"writing {name}", missing_is_error=True):
            self._fs.pipe_file(self._remote(name), raw)
        if name == MANIFEST:
            self._manifest_digest = fs.digest(raw)

    def remove(self, name: str) -> None:
        with self._guard:
            self._fetched.pop(name, None)
        with self._telling(f"removing {name}"):
            try:
                self._fs.rm_file(self._remote(name))
            except FileNotFoundError:
                return

    def commit(self, staged: Path, name: str) -> None:
        """Upload the staged shard, then it is there. Where the upload fails, the shard waits in the outbox.

        Raises: StoreError.
        """
        waiting = self._outbox() / Path(name).name
        fs.make_folder(waiting.parent)
        fs.commit_file(staged, waiting)
        self._send(waiting)

    def local(self, name: str) -> Path:
        with self._fetching[name]:
            with self._guard:
                if name in self._fetched:
                    self._fetched.move_to_end(name)
                    return self._fetched[name]
                self._folder = self._folder or _own_folder(self)
            path = self._folder / Path(name).name
            with self._telling(f"fetching {name}"):
                self._fs.get_file(self._remote(name), str(path))
            with self._guard:
                self._fetched[name] = path
                while len(self._fetched) > _KEPT_SHARDS:
                    fs.remove(self._fetched.popitem(last=False)[1])
            return path

    def _remote(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _list(self, prefix: str) -> list[dict[str, Any]]:
        folder = self._remote(prefix).rstrip("/")
        with self._telling("listing"):
            try:
                self._fs.invalidate_cache(folder)
                entries: list[dict[str, Any]] = self._fs.ls(folder, detail=True)
            except FileNotFoundError as error:
                if _no_bucket(error):
                    raise self._told("listing", error) from error
                return []
        return [entry for entry in entries if entry["name"].rstrip("/").rpartition("/")[0].endswith(folder.strip("/"))]

    def _claim(self) -> None:
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        mine["created"] = psutil.Process().create_time()
        raw = json.dumps(mine).encode()
        with self._telling("locking", missing_is_error=True):
            try:
                self._fs.pipe_file(self._remote(_LOCK), raw, mode="create")
            except FileExistsError:
                held = json.loads(self._fs.cat_file(self._remote(_LOCK)))
                if held["host"] != mine["host"] or _lives(held):
                    raise StoreError(
                        f"{self.where}: process {held['pid']} on {held['host']} writes it since {held['since']}",
                        expected="one writing process at a time",
                        next=f"wait for it; if it has ended for good, remove {self.where}/{_LOCK}: what it has "
                        "committed is kept",
                    ) from None
                self._fs.pipe_file(self._remote(_LOCK), raw)
        self._claimed = True

    def _outbox(self) -> Path:
        """Where finished shards of the store with this manifest wait for their upload."""
        if self._manifest_digest is None:
            self.read(MANIFEST)
        return self.root / _OUTBOX / str(self._manifest_digest)

    def _send_outbox(self) -> None:
        folders = sorted(self.root.glob(f"{_OUTBOX}/*"))
        mine = self._outbox() if folders and MANIFEST in self.sizes() else None
        for folder in folders:
            if folder != mine:  # of a store that was at this URL before
                shutil.rmtree(folder)
                continue
            for waiting in sorted(folder.glob("*.safetensors")):
                say(f"{self.where}: uploading {waiting.name} ({size(waiting.stat().st_size)}), finished before")
                self._send(waiting)

    def _send(self, waiting: Path) -> None:
        """Upload a finished shard, its part of the index first: its own name is the commit."""
        number = int(waiting.stem)
        part, total = waiting.with_name(Path(part_name(number)).name), waiting.stat().st_size
        name = shard_name(number)
        with self._telling(f"uploading {name}", kept=waiting, missing_is_error=True):
            if part.exists():
                self._fs.pipe_file(self._remote(part_name(number)), part.read_bytes())
            self._fs.put_file(str(waiting), self._remote(name))
            self._fs.invalidate_cache(self._remote(name))
            stored = int(self._fs.info(self._remote(name))["size"])
            if stored != total:
                raise OSError(f"{stored:,} of {total:,} bytes arrived")
        fs.remove(waiting)
        fs.remove(part)

    @contextmanager
    def _telling(self, doing: str, *, kept: Path | None = None, missing_is_error: bool = False) -> Iterator[None]:
        """Turn what the file system raises into a StoreError; FileNotFoundError passes unless told otherwise."""
        try:
            yield
        except FileNotFoundError as error:
            if not missing_is_error and not _no_bucket(error):
                raise
            raise self._told(doing, error, kept) from error
        except self._errors as error:
            if isinstance(error, OSError) and error.errno in _LOCAL_FAULTS:
                raise
            raise self._told(doing, error, kept) from error

    def _told(self, doing: str, error: BaseException, kept: Path | None = None) -> StoreError:
        seen = f"{self.where}: {doing}: {str(error) or type(error).__name__}"
        again = "run the same command again: committed shards are kept"
        if kept is not None:
            again += f", and the finished shard waits in {kept} and is sent first"
        kind = type(error).__name__
        if "Credential" in kind or "Profile" in kind or "Token" in kind:
            return StoreError(
                seen,
                expected="credentials for S3",
                cause="none are set in this environment, or they are not whole",
                next=f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (`aws configure`); then {again}",
            )
        if isinstance(error, PermissionError):
            cause, first = (
                "the credentials are wrong or expired, or may not do this",
                "mend them or the bucket's policy; ",
            )
        elif isinstance(error, FileNotFoundError):
            cause, first = "no such bucket", "make the bucket, or mend store.url; "
        else:
            cause, first = (
                "the server can't be reached, or broke the transfer off",
                "see that it is up (AWS_ENDPOINT_URL); ",
            )
        return StoreError(seen, cause=cause, next=f"{first}{again}")


def _errors(scheme: str) -> tuple[type[Exception], ...]:
    """What a file system of this scheme raises when something outside goes wrong."""
    if scheme != "s3":
        return (OSError,)
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError

    return (OSError, BotoCoreError, ClientError)


def _no_bucket(error: FileNotFoundError) -> bool:
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") == "NoSuchBucket"


def _own_folder(files: RemoteFiles) -> Path:
    """A folder for fetched shards that goes with `files`; those of processes that were killed go now.

    A folder's lock tells whether its process lives.
    """
    fs.make_folder(files.root)
    made = [left for left in files.root.glob("new-*") if left.stat().st_mtime < time.time() - _NEW_S]
    for left in (*files.root.glob("read-*"), *made):
        try:
            descriptor = os.open(left, os.O_RDONLY)
        except FileNotFoundError:  # another process, which began with this one, was faster
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            os.close(descriptor)
    unlocked = Path(tempfile.mkdtemp(prefix="new-", dir=files.root))
    descriptor = os.open(unlocked, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = unlocked.rename(files.root / f"read-{unlocked.name}")  # never seen without its lock
    weakref.finalize(files, _drop, folder, descriptor, os.getpid())
    return folder


def _drop(folder: Path, descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take its parent's files
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
