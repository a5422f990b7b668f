"""Known causes, each by the log line, stack or surroundings that it was seen with; what can't be provoked is recorded.

Log lines are SGLang's (0.5.14, 0.5.23), torch's or argparse's own words; stacks name functions of those releases.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from eyas.engine import evidence as gathering
from eyas.engine import gpu
from eyas.engine.causes import CAUSES, Finding, findings
from eyas.engine.diagnose import as_error
from eyas.engine.evidence import Evidence, Member, file_system, iommu_translates, is_network_fs, tail
from eyas.engine.gpu import Gpu, gpus, links
from eyas.errors import EngineError

LOADED = "[2026-11-29 21:15:46] Load weight end. elapsed=0.37 s, type=LlamaForCausalLM, avail mem=20.32 GB"
BLACKWELL = Gpu(0, "GPU-a", "NVIDIA RTX PRO 6000 Blackwell", 97887 << 20, 76 << 30, 0.0, (12, 0), {})
HOPPER = Gpu(0, "GPU-a", "NVIDIA H200", 143771 << 20, 76 << 30, 1.0, (9, 0), {})


def member(pid: int = 100, stack: str = "", state: str = "S", name: str = "sglang::scheduler", **more: Any) -> Member:
    stacks = (f"MainThread: {stack}",) if stack else ()
    return Member(pid, name, state, 0.0, 0.0, 30, stacks=stacks, **more)


def first(evidence: Evidence) -> Finding:
    found = findings(evidence)
    assert found, evidence
    return found[0]


@pytest.mark.parametrize(
    ("line", "cause", "try_next"),
    [
        (
            "/usr/bin/python3: No module named sglang.launch_server",
            "SGLang is not in this interpreter",
            "--set engine.python=PATH",
        ),
        (
            "launch_server.py: error: unrecognized arguments: --disable-piecewise-cuda-graph",
            "a flag that this release doesn't know",
            "mend engine.args",
        ),
        (
            "RuntimeError: Cannot find any model weights with `/models/Kimi-K2.5`",
            "weights are missing or cut",
            "/models/x",
        ),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
            "weights are missing or cut",
            "/models/x",
        ),
        (
            "FileNotFoundError: No such file or directory: '/models/x/model-00002-of-00064.safetensors'",
            "weights are missing or cut",
            "/models/x",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of",
            "the GPU's memory is too small",
            "--mem-fraction-static",
        ),
        (
            "ValueError: Free memory on device cuda:0 (3.1/139.8 GiB) is less than desired GPU memory utilization",
            "the GPU's memory is too small",
            "--gpu-memory-utilization",
        ),
        (
            "(EngineCore pid=6337) ERROR [core.py:1510] ValueError: No available memory for the cache blocks. Try",
            "the KV cache has no room for one sample",
            "lower data.max_tokens",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "the GPU's memory is too small",
            "nvidia-smi",
        ),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried",
            "the machine's memory is too small",
            "capture.ring_bytes",
        ),
        (
            "[21:16:21] Subprocess scheduler (pid=26783) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
            "it was ended by SIGKILL",
            "dmesg",
        ),
        (
            "Out of memory: Killed process 26783 (sglang::schedul) total-vm:190000kB, anon-rss:17000kB",
            "the machine's memory is too small",
            "capture.ring_bytes",
        ),
        ("Subprocess scheduler (pid=9) crashed with exit code -7.", "/dev/shm is too small", "--shm-size"),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('::1', 8000): address already in use",
            "a port is held by another process",
            "ss -ltnp",
        ),
        (
            "ValueError: nccl_port at 28000 is not available in 30 seconds. port 28000 is in use by another process",
            "a port is held by another process",
            "engine.port=0",
        ),
        (
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
            "SGLang was built for other GPUs",
            "nvidia-smi",
        ),
    ],
)
def test_a_dead_servers_last_words(line: str, cause: str, try_next: str) -> None:
    log = ("starting", line, "[21:16:26] kill_process_tree called: parent_pid=26531")
    found = first(Evidence(layer="weights loaded", alive=False, log=log, model_path="/models/x"))
    assert found.cause.startswith(cause) and found.seen == line[-300:] and try_next in found.next


@pytest.mark.parametrize(("code", "cause"), [(-9, "it was ended by SIGKILL"), (-7, "/dev/shm is too small")])
def test_the_signal_that_ended_it(code: int, cause: str) -> None:
    assert first(Evidence(layer="weights loaded", alive=False, exit_code=code)).cause.startswith(cause)


def test_old_lines_explain_nothing_of_a_server_that_is_ready() -> None:
    log = ("port 28000 is in use: address already in use", "The server is fired up and ready to roll!")
    assert findings(Evidence(layer="", members=(member(),), log=log)) == []


def test_stopped() -> None:
    found = first(Evidence(layer="weights loaded", members=(member(7, state="S"), member(8, state="T"))))
    assert found.cause.startswith("a process was stopped") and found.next.startswith("kill -CONT 8 ")


def test_compilers_at_work_are_no_hang() -> None:
    """Before the attention backend, although that would fit as well."""
    working = (member(), member(9, name="cicc", state="R"), member(10, name="ptxas", state="R"))
    evidence = Evidence(layer="warm", members=working, builders=("cicc", "ptxas"), log=(LOADED,), gpus=(BLACKWELL,))
    found = first(evidence)
    assert found.cause.startswith("kernels are being compiled") and "cicc, ptxas" in found.seen
    assert found.next.startswith("wait")


def test_the_attention_backend_on_a_new_gpu() -> None:
    """As it was met: weights loaded, 217 log lines, port closed, threads in futex waits, on SM120."""
    stuck = member(stack="BatchPrefillWrapper.plan (flashinfer/prefill.py:1650) < init (flashinfer_backend.py:200)")
    found = first(Evidence(layer="listening", members=(stuck,), log=(LOADED,), gpus=(BLACKWELL,)))
    assert found.cause.startswith("the attention backend hangs") and "compute capability 12.0" in found.seen
    assert "flashinfer/prefill.py:1650" in found.seen and '"--attention-backend", "triton"' in found.next
    assert findings(Evidence(layer="listening", members=(stuck,), log=(LOADED,), gpus=(HOPPER,))) == []


RANKS = (
    member(1, "GroupCoordinator.all_reduce (parallel_state.py:520) < forward (llama.py:80)"),
    member(2, "AutoTuner.choose_one (flashinfer/autotuner.py:500) < run_flashinfer_autotune_forward (x.py:372)"),
)


def test_autotuning_that_differs_between_ranks() -> None:
    found = first(Evidence(layer="listening", members=RANKS, log=(LOADED,), flags={"tp_size": 2}))
    assert found.cause.startswith("autotuning differs") and "process 2" in found.seen
    assert "--disable-flashinfer-autotune" in found.next


def test_gpus_that_cannot_reach_one_another() -> None:
    stuck = member(1, "PyNcclCommunicator.__init__ (pynccl.py:99) < init_model_parallel_group (parallel_state.py:9)")
    seen = [
        first(Evidence(layer="weights loaded", members=(stuck,), flags={"tp_size": 8}, iommu=iommu))
        for iommu in (False, True)
    ]
    assert all(found.cause.startswith("GPUs can't reach one another") for found in seen)
    assert "IOMMU" in seen[1].seen and "IOMMU" not in seen[0].seen
    assert 'NCCL_P2P_DISABLE = "1"' in seen[1].next and "--disable-custom-all-reduce" in seen[1].next
    assert findings(Evidence(layer="weights loaded", members=(stuck,), flags={"tp_size": 1})) == []


TOPOLOGY = """#!/bin/sh
[ "$1" = topo ] || exit 9
printf '\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\t{link}\\t0-31\\nGPU1\\t{link}\\t X \\t0-31\\n'
printf '\\nLegend:\\n\\n  SYS  = ...\\n'
"""


@pytest.mark.parametrize(("link", "said"), [("NV18", False), ("SYS", True)])
def test_how_gpus_are_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, said: bool) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(TOPOLOGY.format(link=link))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert links() == {link}
    assert gpus() == []  # a driver that answers nothing
    stuck = member(1, "GroupCoordinator.barrier (parallel_state.py:1)")
    evidence = Evidence(layer="warm", members=(stuck,), flags={"tp_size": 2}, links=frozenset(links()))
    assert ("connected by PCIe only (SYS)" in first(evidence).seen) is said


def test_a_driver_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "_PATIENCE_S", 0.3)
    with pytest.raises(EngineError, match="does not answer within 0.3 s"):
        gpus()
    assert "does not answer" in gathering.examine([], log=None).gpu_note


def test_weights_on_a_network_disk() -> None:
    waits = member(5, "safetensors_weights_iterator (weight_utils.py:700)", state="D", waits_in="folio_wait_bit_common")
    evidence = Evidence(layer="weights loaded", members=(waits,), model_path="/nfs/kimi", model_fs="nfs4")
    found = first(evidence)
    assert found.cause.startswith("weights are read slowly") and "lies on nfs4" in found.seen
    assert "copy /nfs/kimi to a local disk" in found.next
    reads = member(5, "safetensors_weights_iterator (weight_utils.py:700)", state="R")
    assert first(Evidence(layer="weights loaded", members=(reads,), model_fs="fuse.s3fs")).cause == found.cause
    assert findings(Evidence(layer="weights loaded", members=(reads,), model_fs="ext4")) == []


@pytest.mark.parametrize("stack", ["", "TCPStore.__init__ (c10d.py:1) < init_process_group (distributed_c10d.py:1700)"])
def test_a_node_that_waits_for_its_peers(stack: str) -> None:
    log = ("[21:15:44] Init parallel begin.",)
    found = first(Evidence(layer="weights loaded", members=(member(stack=stack),), log=log, flags={"nnodes": 2}))
    assert found.cause == "a node waits for its peers" and "--dist-init-addr" in found.next
    log = (*log, "[21:15:44] Init parallel ends. elapsed=0.02 s")
    assert findings(Evidence(layer="weights loaded", members=(member(),), log=log, flags={"nnodes": 2})) == []


def test_pipeline_warm_up() -> None:
    found = first(Evidence(layer="warm", members=(member(),), flags={"pp_size": 2}))
    assert found.cause.startswith("pipeline parallel warms up") and "--pp-size 1" in found.next


def test_a_healthy_loading_server_has_no_cause() -> None:
    works = member(stack="safetensors_weights_iterator (weight_utils.py:700)", state="R")
    assert findings(Evidence(layer="weights loaded", members=(works,), model_fs="ext4", gpus=(BLACKWELL,))) == []


def test_every_cause_has_a_next_step_and_stands_in_the_docs() -> None:
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names) and all(cause.next for cause in CAUSES)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in (ROOT / "docs/serve.md").read_text().splitlines()]
    assert [row for row in rows if row in names] == names


def test_the_end_of_a_log_with_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n\nLoading:   0%\rLoading:  50%\rLoading: 100%\r\nlast")
    assert tail(log, 5) == ["one", "Loading: 100%", "last"]
    assert tail(log, 1) == ["last"] and tail(tmp_path / "none", 5) == []


def test_file_systems() -> None:
    assert file_system(Path("/proc/self")) == "proc" and file_system(Path("/dev/shm")) == "tmpfs"
    assert [is_network_fs(kind) for kind in ("nfs4", "fuse.gcsfuse", "lustre", "ext4", "tmpfs")] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("kind", "translates"), [("DMA-FQ\n", True), ("DMA\n", True), ("identity\n", False), ("", False)]
)
def test_an_iommu_in_front_of_a_gpu(tmp_path: Path, kind: str, translates: bool) -> None:
    for name, vendor, group in (("0000:01:00.0", "0x10de\n", kind), ("0000:02:00.0", "0x8086\n", "DMA\n")):
        device = tmp_path / "bus/pci/devices" / name
        (device / "iommu_group").mkdir(parents=True)
        (device / "vendor").write_text(vendor)
        if group:
            (device / "iommu_group/type").write_text(group)
    assert iommu_translates(tmp_path) is translates


def test_stacks_of_this_very_process() -> None:
    found = gathering.stacks(os.getpid(), gathering.find_py_spy())
    assert any(stack.startswith("MainThread: ") and "stacks (" in stack for stack in found), found


def test_of_an_unknown_failure_the_first_error_is_shown() -> None:
    """vLLM's processes fail one after the other, and what the first said is a hundred lines up."""
    log = (
        "WARNING [system_utils.py:255] limits like `OSError: [Errno 24] Too many open files`",
        "(Worker pid=7) ERROR [core.py:9] ValueError: block size 7 is odd",
        '(EngineCore pid=6)   File "core.py", line 1431, in wait',
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.",
    )
    error = as_error(Evidence(layer="listening", alive=False, log=log), "vLLM ended", Path("e.log"), "eyas doctor")
    assert error.cause == "none of the known ones; the first error in its log: " + log[1]
