"""Everything the report shows, read from a run's files. Stages that aren't finished leave their part empty."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from eyas.drafter.saved import checkpoints
from eyas.drafter.vocab import coverage
from eyas.engine.profile import load_profile
from eyas.errors import StoreError
from eyas.recipe import dump_recipe
from eyas.record import Record, load_record
from eyas.report.data import DataFacts, data_facts
from eyas.run import Run
from eyas.stages import last_error, stages_of
from eyas.store.reader import StoreReader
from eyas.train.log import read_log

Json = dict[str, Any]


@dataclass(frozen=True)
class StoreFacts:
    """The store's figures: what is in it, not what was planned."""

    url: str
    samples: int
    tokens: int
    supervised: int
    size_bytes: int
    manifest: Json

    @property
    def bytes_per_token(self) -> float:
        return self.size_bytes / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class Vocabulary:
    """How much of the target's output the draft vocabulary can say; a token outside it is never accepted."""

    size: int
    target_size: int
    coverage: dict[str, float]


@dataclass(frozen=True)
class Facts:
    """One run's figures.

    Attributes:
        records: finished stages in order; None where a stage isn't finished.
        tokens: tokens/manifest.json.
        data: figures and samples of tokens/; None where the set is not whole.
        evaluation: eval.json.
        serving: serving.json, what `eyas evaluate --engine` measured.
        serving_stale: whether the drafter was exported anew since.
        tuned: engine -> evidence of `eyas tune`.
        shape: bench/shape.json, speed-up by simulated acceptance length (benchmarks/serving_sglang.py).
        steps: lines of logs/train.jsonl with a loss.
        heldout: its held-out measurements, each with its step.
        sizes: bytes of each folder of the run, and of the store wherever it lies; absent ones are left out.
        error: the last error that a stage noted, while a stage isn't finished.
        store_fault: why the store could not be read, in one line; "" where it was.
    """

    run: Run
    records: dict[str, Record | None]
    tokens: Json | None
    data: DataFacts | None
    store: StoreFacts | None
    store_fault: str
    vocabulary: Vocabulary | None
    evaluation: Json | None
    serving: Json | None
    serving_stale: bool
    tuned: dict[str, Json]
    shape: Json | None
    steps: list[Json]
    heldout: list[Json]
    sizes: dict[str, int]
    error: Json | None
    recipe_text: str = field(repr=False)

    def counts(self, stage: str) -> Json:
        record = self.records.get(stage)
        return record.counts if record else {}

    @property
    def acceptance_length(self) -> float | None:
        return _number(self.evaluation, "acceptance_length")

    @property
    def speedup(self) -> float | None:
        """Reference decoding against plain decoding in the same process, wall time."""
        return _number((self.evaluation or {}).get("decode"), "speedup")

    @property
    def train_tokens_per_s(self) -> float | None:
        """Of the process that finished training, packing and measuring excluded; while it goes on, so far."""
        return _number(self.counts("train"), "tokens_per_s") or _number((self.steps or [{}])[-1], "tokens_per_s")

    @property
    def versions(self) -> dict[str, list[str]]:
        """Package -> versions that the stages recorded; more than one where the environment changed in between."""
        seen: dict[str, list[str]] = {}
        for record in self.records.values():
            for name, version in (record.versions if record else {}).items():
                if version not in seen.setdefault(name, []):
                    seen[name].append(version)
        return seen


def gather(run: Run) -> Facts:
    """Read a run's folder (and its store, where there is one)."""
    reader, store, fault = None, None, ""
    try:
        reader = StoreReader(run.store_url)
        store = _store_facts(reader, run.store_url)
    except StoreError as error:
        fault = error.seen
    log = run.logs_dir / "train.jsonl"
    lines = read_log(log) if log.is_file() else []
    records = {name: load_record(run.dir, name) for name in stages_of(run)}
    folders = {"tokens/": run.tokens_dir, "train/": run.train_dir, "export/": run.export_dir, "logs/": run.logs_dir}
    sizes = {name: _folder_bytes(path) for name, path in folders.items() if path.is_dir()}
    return Facts(
        run=run,
        records=records,
        tokens=_read_json(run.tokens_dir / "manifest.json"),
        data=data_facts(run),
        store=store,
        store_fault=fault,
        vocabulary=_vocabulary(run, reader),
        evaluation=_read_json(run.dir / "eval.json"),
        serving=_read_json(run.dir / "serving.json"),
        serving_stale=_serving_stale(run),
        tuned=_tuned(run),
        shape=_read_json(run.dir / "bench" / "shape.json"),
        steps=[line for line in lines if "loss" in line],
        heldout=[line["heldout"] | {"step": line["step"]} for line in lines if "heldout" in line],
        sizes=sizes | ({"store": store.size_bytes} if store else {}),
        error=None if all(records.values()) else last_error(run),
        recipe_text=dump_recipe(run.recipe),
    )


def _store_facts(reader: StoreReader, url: str) -> StoreFacts:
    samples = reader.samples()
    return StoreFacts(
        url=url,
        samples=len(samples),
        tokens=sum(sample.tokens for sample in samples),
        supervised=sum(sample.supervised for sample in samples),
        size_bytes=sum(reader.files.sizes().values()),
        manifest=reader.manifest.model_dump(),
    )


def _vocabulary(run: Run, reader: StoreReader | None) -> Vocabulary | None:
    """From the newest weights that hold t2d (the export's, else the newest checkpoint's) and the store's counts."""
    folders = [run.export_dir, *checkpoints(run.train_dir)[-1:]]
    path = next((path for path in folders if (path / "model.safetensors").is_file()), None)
    if path is None:
        return None
    with safe_open(path / "model.safetensors", framework="numpy") as handle:
        if "t2d" in handle.keys():  # noqa: SIM118
            t2d = handle.get_tensor("t2d")
        else:  # an export whose draft vocabulary is the target's whole one
            t2d = np.ones(handle.get_slice("lm_head.weight").get_shape()[0], dtype=bool)
    ids = np.flatnonzero(t2d)
    shares = {}
    for split in ("train", "heldout") if reader else ():
        counts = reader.token_counts(split) if reader else np.zeros(0, dtype=np.int64)
        if counts.sum():
            shares[split] = coverage(counts, ids)
    return Vocabulary(len(ids), len(t2d), shares)


def _serving_stale(run: Run) -> bool:
    """Whether the drafter that was measured in an engine is another than the one that is exported now."""
    measured, exported = load_record(run.dir, "serving"), load_record(run.dir, "export")
    if measured is None or exported is None:
        return False
    return measured.inputs.get("output of export") != exported.output


def _tuned(run: Run) -> dict[str, Json]:
    """Evidence of each engine's tuned profile, where it has some (one of a user's own may have none)."""
    found = {path.stem.removeprefix("tuned-"): load_profile(str(path)) for path in run.dir.glob("tuned-*.toml")}
    return {name: found[name].evidence for name in sorted(found) if found[name].evidence.get("configurations")}


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_json(path: Path) -> Json | None:
    """A JSON file; None where it isn't there (its stage isn't finished)."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def standard_error(shares: Sequence[float], verifications: float) -> float:
    """Of an acceptance length, from the share of verifications that accepted the draft at each position, verifications
    taken for independent."""
    # P(accepted >= i) = shares[i - 1], so E[a] = sum of shares and E[a^2] = sum of (2i - 1) shares.
    mean = sum(shares)
    square = sum((2 * place + 1) * share for place, share in enumerate(shares))
    return math.sqrt(max(square - mean**2, 0.0) / verifications)


def _number(table: Json | None, key: str) -> float | None:
    value = (table or {}).get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
