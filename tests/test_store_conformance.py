"""The conformance suite on a local folder and on fsspec's memory file system; test_store_s3.py has S3."""

from pathlib import Path

import fsspec
import pytest
from conformance_store import Place, StoreSuite


class TestLocal(StoreSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        folder = tmp_path / "store"

        def put(name: str, raw: bytes) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)

        return Place(
            str(folder),
            lambda name: (folder / name).read_bytes(),
            put,
            lambda: {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()},
        )


class TestMemory(StoreSuite):
    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
        monkeypatch.setenv("EYAS_STAGING", str(tmp_path / "staging"))
        memory, root = fsspec.filesystem("memory"), f"/{tmp_path.name}/store"
        return Place(
            f"memory:/{root}",
            lambda name: memory.cat_file(f"{root}/{name}"),
            lambda name, raw: memory.pipe_file(f"{root}/{name}", raw),
            lambda: {name.removeprefix(f"{root}/") for name in memory.find(root)},
        )
