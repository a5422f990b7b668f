"""Every cause that preflight finds before a start, provoked; one clear error each."""

import json
import os
import platform
import shlex
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_serve import make_stand_in, stand_in_run
from helpers_tiny import make_tiny_target

from eyas import fs
from eyas.engine import find, process
from eyas.engine import preflight as module
from eyas.engine.drafting import serving_run
from eyas.engine.preflight import Facts, check_ring, faults, preflight
from eyas.errors import EngineError, EyasError, RecipeError, StoreFull, TargetError
from eyas.run import Run


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this machine's usual places are not looked for: that takes seconds."""
    monkeypatch.setattr(find, "_USUAL_PLACES", ())


def checked(run: Run) -> Facts:
    facts = Facts(run)
    preflight(facts)
    return facts


def only_fault(run: Run) -> EyasError:
    """The one fault that there is; it is what a start raises too."""
    found = list(faults(run))
    assert len(found) == 1, [str(error) for error in found]
    with pytest.raises(type(found[0])) as raised:
        checked(run)
    assert str(raised.value) == str(found[0])
    return found[0]


def test_nothing_wrong_is_said_to_be_nothing(tmp_path: Path, tiny_target: Path) -> None:
    run = stand_in_run(tmp_path, tiny_target)
    assert list(faults(run)) == []
    assert checked(run).flags["disable_radix_cache"] is True


def test_the_systems_python_holds_no_engine(tmp_path: Path, tiny_target: Path) -> None:
    """The classic: `No module named sglang`, with where it is."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", f"engine.python={bare}/bin/python", "engine.env={}"))
    assert isinstance(error, EngineError) and "No module named sglang (it holds no engine)" in error.seen
    assert str(bare) in error.seen  # the link itself, not the interpreter it was made from
    assert "--set engine.python=" in error.next and error.expected and error.cause


def test_where_engines_are_is_said(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", other], check=True)
    site = next((other / "lib").glob("python3*/site-packages"))
    (site / "sglang").mkdir()
    (site / "sglang/__init__.py").touch()
    (site / "sglang-0.5.14.dist-info").mkdir()
    (site / "sglang-0.5.14.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.14\n")
    monkeypatch.setattr(find, "_USUAL_PLACES", (str(tmp_path),))
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", "engine.env={}"))
    assert f"{other}/bin/python holds SGLang 0.5.14" in error.next and error.next.startswith("--set engine.python=")


def test_a_python_path_of_the_shell_is_not_passed_on_and_that_is_said(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", "engine.env={}"))
    assert "say it in engine.env" in error.cause


@pytest.mark.parametrize(
    ("python", "match"), [("", "engine.python is empty"), ("/nowhere/python", "No such file"), ("/bin/ls", "exit code")]
)
def test_no_interpreter(tmp_path: Path, tiny_target: Path, python: str, match: str) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", f"engine.python={python}"))
    assert match in error.seen and error.next


def test_a_release_that_is_not_known(tmp_path: Path, tiny_target: Path) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, version="0.5.24"))
    assert "SGLang 0.5.24" in error.seen and "0.5.11 to 0.5.23" in error.expected


def test_an_engine_that_is_there_and_broken(tmp_path: Path, tiny_target: Path) -> None:
    run = stand_in_run(tmp_path, tiny_target)
    (tmp_path / "engine-0.5.23/sglang/srt/server_args.py").write_text("import libcuda_of_another_release\n")
    error = only_fault(run)
    assert "can't be imported: ModuleNotFoundError: No module named 'libcuda_of_another_release'" in error.seen


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A target in three weight files with their index."""
    from transformers import LlamaForCausalLM

    folder = make_tiny_target(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_a_whole_sharded_model_is_fine(tmp_path: Path, sharded: Path) -> None:
    assert list(faults(stand_in_run(tmp_path, sharded))) == []


def test_a_missing_shard(tmp_path: Path, sharded: Path) -> None:
    gone = sorted(sharded.glob("model-*.safetensors"))[1]
    gone.unlink()
    error = only_fault(stand_in_run(tmp_path, sharded))
    assert isinstance(error, TargetError)
    assert "1 weight files are missing" in error.seen and gone.name in error.seen


def test_a_cut_shard(tmp_path: Path, sharded: Path) -> None:
    cut = sorted(sharded.glob("model-*.safetensors"))[1]
    length = cut.stat().st_size
    os.truncate(cut, length - 5)
    error = only_fault(stand_in_run(tmp_path, sharded))
    assert f"{length - 5:,} bytes; its header says {length:,}" in error.seen


@pytest.mark.parametrize(
    "content",
    [b"", b"\1", b"version https://git-lfs.github.com/spec/v1\noid x\nsize 9\n", struct.pack("<Q", 9) + b"not JSON!"],
)
def test_what_is_no_weight_file(tmp_path: Path, sharded: Path, content: bytes) -> None:
    sorted(sharded.glob("model-*.safetensors"))[0].write_bytes(content)
    error = only_fault(stand_in_run(tmp_path, sharded))
    assert "no safetensors header" in error.seen


def test_an_index_of_another_download(tmp_path: Path, sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(index["weight_map"])
    index["weight_map"][names[0]], index["weight_map"][names[-1]] = (
        index["weight_map"][names[-1]],
        index["weight_map"][names[0]],
    )
    path.write_text(json.dumps(index))
    error = only_fault(stand_in_run(tmp_path, sharded))
    assert "tensors that the index places there are missing" in error.seen


def test_no_model_folder(tmp_path: Path) -> None:
    error = only_fault(stand_in_run(tmp_path, tmp_path / "nowhere"))
    assert "no such folder" in error.seen


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_a_held_port_and_by_whom(tmp_path: Path, tiny_target: Path, listening: int) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", f"engine.port={listening}"))
    assert error.seen.startswith(f"port {listening} is held by process {os.getpid()}: ")
    assert "pytest" in error.seen and "engine.port=0" in error.next


@pytest.mark.parametrize(
    ("folder", "stop"),
    [
        ("engine", "eyas serve stop /data/runs/other, or"),
        ("serving", "eyas serve stop /data/runs/other --with-drafter, or"),
        ("serving/without", "kill PID (a server that a stage measures), or"),
        ("tune/drafts-3", "kill PID (a server that a stage measures), or"),
    ],
)
def test_a_port_held_by_an_earlier_server_of_eyas(tmp_path: Path, tiny_target: Path, folder: str, stop: str) -> None:
    program = (
        "import socket, time\nheld = socket.socket()\nheld.bind(('127.0.0.1', 0))\nheld.listen()\n"
        "print(held.getsockname()[1], flush=True)\ntime.sleep(600)"
    )
    mark, log = f"/data/runs/other/{folder}:00000001", tmp_path / "log"
    held = process.launch([sys.executable, "-c", program], os.environ | {process.MARK: mark}, log)
    try:
        while not log.read_text():
            pass
        error = only_fault(stand_in_run(tmp_path, tiny_target, "", f"engine.port={int(log.read_text())}"))
        assert error.next.startswith(stop.replace("PID", str(held.pid)))
    finally:
        process.end(held.pid, mark, 1)


def test_an_address_of_another_machine(tmp_path: Path, tiny_target: Path) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", "engine.host=192.0.2.1"))
    assert isinstance(error, RecipeError) and "engine.host = 192.0.2.1" in error.seen


def test_an_ipv6_address(tmp_path: Path, tiny_target: Path) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", "engine.host=::1"))
    assert isinstance(error, RecipeError) and "IPv4" in error.expected


def test_a_key_that_eyas_would_not_send(tmp_path: Path, tiny_target: Path) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", 'engine.args=["--api-key", "x"]'))
    assert error.seen == "engine.args holds --api-key" and "Eyas sends no key" in error.next
    run = stand_in_run(tmp_path, tiny_target, "", 'engine.args=["--api-key", "x"]', profile="serving")
    assert Facts(run).launch.flags[-2:] == ["--api-key", "x"]  # for users it is no fault


def test_a_processor_without_ordered_stores(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    error = only_fault(stand_in_run(tmp_path, tiny_target))
    assert error.seen == "this machine is aarch64" and "engine.kind=local" in error.next
    assert list(faults(stand_in_run(tmp_path, tiny_target, profile="serving"))) == []


@pytest.mark.parametrize(
    ("override", "seen", "next_step"),
    [
        ("serving.python=/nowhere/python", "serving.python = /nowhere/python", "--set serving.python="),
        ("serving.host=192.0.2.1", "serving.host = 192.0.2.1", "--set serving.host="),
        ('serving.args=["--dtype", "half"]', "serving.args holds --dtype", "say it with serving.dtype"),
        ('serving.args=["--device", "cpu"]', "serving.args holds --device", "say it with engine.device"),
        ('serving.args=["--tp-sise", "2"]', "(in serving.args)", ""),
    ],
)
def test_what_serving_says_is_named_so(
    tmp_path: Path, tiny_target: Path, override: str, seen: str, next_step: str
) -> None:
    """The server of [serving] is started by a run with that table in the place of [engine]."""
    path = make_stand_in(tmp_path / "engine-0.5.23")
    with pytest.raises(RecipeError, match="serving.profile = 'fast'"):
        serving_run(stand_in_run(tmp_path, tiny_target, "", "serving.profile=fast"), None)
    both = [override] if "python" not in override else [override, f"serving.env={{PYTHONPATH='{path}'}}"]
    error = only_fault(serving_run(stand_in_run(tmp_path, tiny_target, "", *both), None))
    assert seen in error.seen and next_step in error.next
    assert "engine." not in str(error).replace("engine.device", "")


def test_a_ring_too_small_for_rows(tmp_path: Path) -> None:
    wide = make_tiny_target(tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text()) | {"hidden_size": 7168}
    (wide / "config.json").write_text(json.dumps(config))
    error = only_fault(stand_in_run(tmp_path, wide))
    assert isinstance(error, RecipeError)
    assert error.seen == "capture.ring_bytes = 1,048,576" and "at least" in error.expected


def test_a_ring_larger_than_dev_shm(tmp_path: Path, tiny_target: Path) -> None:
    run = stand_in_run(tmp_path, tiny_target, "", f"capture.ring_bytes={1 << 50}")
    found = [error for error in faults(run) if "/dev/shm has" in error.seen]
    assert len(found) == 1 and "--shm-size" in found[0].next
    with pytest.raises(EngineError, match="/dev/shm has"):
        check_ring(Facts(run))


def test_memory_too_small(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 2 << 30)
    error = only_fault(stand_in_run(tmp_path, tiny_target))
    assert "2.15 GB of memory are free" in error.seen and "SGLang itself 3.22 GB" in error.seen


def test_a_disk_too_small_for_what_prepare_counted(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "free_bytes", lambda folder: 1 << 40)
    run = stand_in_run(tmp_path, tiny_target)
    run.tokens_dir.mkdir(parents=True)
    counts = {"tokens": 10**14, "supervised_tokens": 5 * 10**13}
    (run.tokens_dir / "manifest.json").write_text(json.dumps(counts))
    error = only_fault(run)
    assert isinstance(error, StoreFull) and "the store of 100,000,000,000,000 tokens takes" in error.seen


def test_a_half_filled_store_needs_the_other_half(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stand_in_run(tmp_path, tiny_target, "", "store.min_free_bytes=0")
    run.tokens_dir.mkdir(parents=True)
    (run.tokens_dir / "manifest.json").write_text(json.dumps({"tokens": 1000, "supervised_tokens": 0}))
    monkeypatch.setattr(fs, "free_bytes", lambda folder: 200_000 if "runs" in str(folder) else 1 << 40)
    whole = 1000 * (6 * 48 + 5)
    assert isinstance(only_fault(run), StoreFull)
    shards = run.dir / "store/shards"
    shards.mkdir(parents=True)
    (shards / "000000.safetensors").write_bytes(b"\0" * (whole - 200_000))
    assert list(faults(run)) == []


@pytest.mark.parametrize(
    ("args", "seen", "told"),
    [
        (["--tp-sise", "8"], "SGLang 0.5.23 does not know --tp-sise (in engine.args)", "the nearest is --tp-size"),
        (["--nonsense=1"], "does not know --nonsense=1", "a flag of that release"),
        (["--tp-size", "many"], "refuses its flags: argument --tp-size: invalid int value: 'many'", "as this release"),
    ],
)
def test_flags_that_this_release_does_not_know(
    tmp_path: Path, tiny_target: Path, args: list[str], seen: str, told: str
) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", f"engine.args={json.dumps(args)}"))
    assert seen in error.seen and told in error.expected


def test_a_flag_of_the_profile_that_is_not_known_there(tmp_path: Path, tiny_target: Path) -> None:
    (tmp_path / "own.toml").write_text(
        'purpose = "serve"\nabout = "own"\n[[flags]]\nflag = "--enable-magic"\nreason = "it was said to help"\n'
    )
    error = only_fault(stand_in_run(tmp_path, tiny_target, profile=str(tmp_path / "own.toml")))
    assert "does not know --enable-magic (in profile own)" in error.seen


@pytest.mark.parametrize(
    ("args", "flag", "reason"),
    [
        (["--enable-two-batch-overlap"], "--enable-two-batch-overlap", "half batches"),
        (["--enable-mixed-chunk"], "--enable-mixed-chunk", "decode steps"),
        (["--pp-size", "2"], "--pp-size", "pipeline"),
        (["--pp", "2"], "--pp-size", "pipeline"),  # an abbreviation is read as the server reads it
        (["--enable-layernorm-sp"], "--enable-layernorm-sp", "sharded"),
        (["--enable-pdmux"], "--enable-pdmux", "split by layers"),
        (["--dp-size", "2"], "--dp-size", "ring"),
        (["--nnodes", "2"], "--nnodes", "other machines"),
    ],
)
def test_flags_that_would_make_states_wrong(
    tmp_path: Path, tiny_target: Path, args: list[str], flag: str, reason: str
) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", f"engine.args={json.dumps(args)}"))
    assert error.seen.startswith(f"{flag} is ") and reason in error.cause
    assert (
        list(faults(stand_in_run(tmp_path, tiny_target, "", f"engine.args={json.dumps(args)}", profile="serving")))
        == []
    )


def test_the_answer_of_the_servers_parser_is_kept(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stand_in_run(tmp_path, tiny_target)
    run.dir.mkdir(parents=True)
    checked(run)
    (tmp_path / "engine-0.5.23/sglang/srt/server_args.py").write_text("raise RuntimeError('asked again')\n")
    checked(run)
    changed = stand_in_run(tmp_path, tiny_target, "", 'engine.args=["--tp-size", "1"]')
    (tmp_path / "engine-0.5.23/sglang/srt/server_args.py").write_text("raise RuntimeError('asked again')\n")
    with pytest.raises(EngineError, match="asked again"):
        checked(changed)


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) printf '%s\\n' "0, GPU-aa, NVIDIA H200, 143771, {used}, 0, 9.0" \\
    "1, GPU-bb, NVIDIA H200, 143771, 4, 0, 9.0";;
  --query-compute-apps*) printf '%s\\n' "GPU-aa, {pid}, 120000" "GPU-aa, 99999999, [N/A]";;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that shows two GPUs, the first with 120,000 MiB held by this process and an unseen one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(SMI.format(used=120500, pid=os.getpid()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.usefixtures("smi")
def test_gpu_memory_that_is_held_and_by_whom(tmp_path: Path, tiny_target: Path) -> None:
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", "engine.device=cuda"))
    assert error.seen.startswith("GPU 0 (NVIDIA H200): 126 GB of 151 GB are held: ")
    assert f"process {os.getpid()} (" in error.seen and "126 GB" in error.seen
    assert "process 99999999 (of another container or user)" in error.seen
    advised = shlex.split(error.next.partition("--set ")[2])[0]
    assert list(faults(stand_in_run(tmp_path, tiny_target, "", "engine.device=cuda", advised))) == []


@pytest.mark.usefixtures("smi")
@pytest.mark.parametrize(
    "override", ['engine.env.CUDA_VISIBLE_DEVICES="1"', 'engine.args=["--mem-fraction-static", "0.1"]',
                 'engine.args=["--base-gpu-id", "1"]']
)  # fmt: skip
def test_gpus_that_are_free_enough(tmp_path: Path, tiny_target: Path, override: str) -> None:
    assert list(faults(stand_in_run(tmp_path, tiny_target, "", "engine.device=cuda", override))) == []


@pytest.mark.usefixtures("smi")
def test_more_gpus_than_there_are(tmp_path: Path, tiny_target: Path) -> None:
    args = 'engine.args=["--tp-size", "4"]'
    error = only_fault(stand_in_run(tmp_path, tiny_target, "", "engine.device=cuda", args))
    assert "2 GPUs are visible; the server wants 4" in error.seen
