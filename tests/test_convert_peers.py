"""What we write is read by the other tools' own code, and what they write by us.

speculators 0.7.0.1 (the last that reads data_{i}.pt), speculators 0.9.0 and SpecForge 0.2.0 run in environments of
their own, which the first run makes (helpers_peers.py).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_convert import Captured, capture, make_target, write_captured
from helpers_peers import environment, run_peer
from safetensors.torch import load_file

from eyas.store.convert.exporter import export_store
from eyas.store.convert.importer import ImportOptions, import_folder
from eyas.store.reader import StoreReader
from eyas.target import Target

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(1800)  # an environment may have to be made, on a slow line
# Of a probability, after bf16 took final states to 8 bits three times: stored, divided by the norm, normed again.
PROBABILITY = 0.02


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Target, dict[str, Captured]]]:
    folder = tmp_path_factory.mktemp("convert")
    target = make_target(folder / "target")
    captured = capture(target, 24)
    write_captured(str(folder / "store"), target, captured)
    yield folder, target, {one.sample.id: one for one in captured}


@pytest.mark.parametrize("name, peer", [("speculators-v1", "speculators 0.7"), ("speculators", "speculators 0.9")])
def test_speculators_trains_from_what_we_write(
    world: tuple[Path, Target, dict[str, Captured]], tmp_path: Path, name: str, peer: str
) -> None:
    folder, target, captured = world
    export_store(name, str(folder / "store"), tmp_path / name, target=target)
    printed = run_peer(peer, "speculators_read.py", tmp_path / name, target.path, tmp_path)
    print(printed)
    assert f"{peer}." in printed and "24 samples" in printed

    read = load_file(tmp_path / "samples.safetensors")
    refs = sorted(StoreReader(str(folder / "store")).samples(), key=lambda ref: ref.split != "train")
    for row, ref in enumerate(refs):
        one = captured[ref.sample_id]
        assert read[f"{row}.input_ids"].tolist() == one.sample.token_ids.tolist()
        assert read[f"{row}.loss_mask"].tolist() == one.sample.loss_mask.astype(int).tolist()
        assert torch.equal(read[f"{row}.hidden_states"], one.aux.flatten(1))
        final, mask = read[f"{row}.verifier_last_hidden_states"], torch.from_numpy(one.sample.loss_mask)
        assert not final[~mask].any() and final[mask].any(-1).all()
    assert read["approx_lengths"].tolist() == [ref.tokens for ref in refs]

    batch = load_file(tmp_path / "batch.safetensors")
    assert torch.isfinite(batch["loss"]) and torch.isfinite(batch["gradient"]) and batch["gradient"] > 0
    compared = _compare_targets(batch, {tuple(one.sample.token_ids): one for one in captured.values()}, target)
    assert compared["rows"] > 50 and compared["probability"] < PROBABILITY and compared["divergence"] < 1e-3
    assert compared["best_agree"] > 0.95
    print(f"{peer}: {compared}")


def _compare_targets(batch: dict[str, torch.Tensor], by_ids: dict, target: Target) -> dict[str, float]:
    """The distributions that speculators' model learns from against lm_head of the states that the target made.

    Row j of a document holds token j + 1 and the target's distribution at it; only rows with the mask set are learnt.
    """
    head = load_file(target.path / "model.safetensors")["lm_head.weight"]
    worst, divergence, agree, rows = 0.0, 0.0, 0, 0
    documents = batch["document_ids"][0]
    for document in range(int(documents.max()) + 1):
        at = (documents == document).nonzero().flatten()
        tokens, mask = batch["input_ids"][0, at].tolist(), batch["loss_mask"][0, at].bool()
        found = [one for ids, one in by_ids.items() if list(ids[1 : 1 + len(tokens)]) == tokens]
        assert len(found) == 1
        truth = (found[0].final[1 : 1 + len(tokens)].float() @ head.T).softmax(-1)[mask]
        seen = batch["target_probabilities"][0, at][mask]
        worst = max(worst, float((truth - seen).abs().max()) if len(truth) else 0.0)
        divergence += float((truth * (truth / seen).log()).sum())
        agree, rows = agree + int((truth.argmax(-1) == seen.argmax(-1)).sum()), rows + len(truth)
    return {"rows": rows, "probability": worst, "divergence": divergence / rows, "best_agree": agree / rows}


@pytest.mark.parametrize("compress", [False, True])
def test_specforge_trains_from_what_we_write(
    world: tuple[Path, Target, dict[str, Captured]], tmp_path: Path, compress: bool
) -> None:
    folder, _, captured = world
    export_store("specforge", str(folder / "store"), tmp_path / "features", target=None, compress=compress)
    print(run_peer("speculators 0.9", "specforge_read.py", tmp_path / "features", tmp_path))
    read = load_file(tmp_path / "samples.safetensors")
    refs = sorted(StoreReader(str(folder / "store")).samples(), key=lambda ref: ref.split != "train")
    for row, ref in enumerate(refs):
        one = captured[ref.sample_id]
        mask = torch.from_numpy(one.sample.loss_mask)
        assert read[f"{row}.input_ids"][0].tolist() == one.sample.token_ids.tolist()
        assert read[f"{row}.loss_mask"][0, :-1].tolist() == mask[:-1].long().tolist()  # it clears the last one
        assert torch.equal(read[f"{row}.hidden_state"][0], one.aux.flatten(1))
        assert torch.equal(read[f"{row}.target"][0][mask], one.final[mask])
        assert not read[f"{row}.target"][0][~mask].any()


def test_we_read_what_their_libraries_write(world: tuple[Path, Target, dict[str, Captured]], tmp_path: Path) -> None:
    """A data set in three Arrow files and states in fp8, one scale a token for all four layers."""
    folder, target, captured = world
    export_store("speculators", str(folder / "store"), tmp_path / "ours", target=target)
    assert "24 rows in 3 files" in run_peer(
        "speculators 0.9", "speculators_write.py", tmp_path / "ours", tmp_path / "theirs"
    )
    report = import_folder(
        "speculators", tmp_path / "theirs", str(tmp_path / "store"), target, ImportOptions(tool_layer_ids=[2, 4, 5])
    )
    assert (report.read, report.written, dict(report.rejected)) == (24, 24, {})
    reader = StoreReader(str(tmp_path / "store"))
    for name, one in captured.items():
        stored = reader.read(name)
        off = stored.aux_hidden_states.float() - one.aux.float()
        assert off.norm() < 0.05 * one.aux.float().norm()


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    assert environment("speculators 0.7") == environment("speculators 0.7")
    assert environment("speculators 0.7").is_file() and environment("speculators 0.7") != environment("speculators 0.9")
