"""Known causes of servers that end or hang at their start: how each is recognised, and what to try next.

A table. A cause's `signature` looks at the evidence and says what it saw, or "" where it doesn't fit. Sources: the
hand-made pipeline's write-ups, SGLang's issues and pull requests named beside the entries, and its own messages
(0.5.14 and 0.5.23).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from eyas.engine.evidence import Evidence, is_network_fs

Signature = Callable[[Evidence], str]

_CONTINUE = "kill -CONT {stopped}   # and see who stopped it: a terminal's ^Z, a debugger, a job scheduler"
_COLLECTIVE = re.compile(
    r"all_reduce|all_gather|barrier|broadcast|ncclCommInit|PyNcclCommunicator|custom_all_reduce|init_distributed_environment"
)
_PEERS = re.compile(r"TCPStore|rendezvous|init_process_group|_create_c10d_store|create_tcp_store")
_TUNING = re.compile(r"autotun", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|flashinfer|flash_attn|trtllm|cuda_graph|_dummy_run|warmup|kernel", re.IGNORECASE)
_READING = re.compile(r"load_weights|safetensors|get_tensor|_weights_iterator|load_model|load_file")


@dataclass(frozen=True)
class Cause:
    """An entry of the table.

    Attributes:
        name: the cause, as it is told.
        hangs: it explains a living server; otherwise it is read from the log of any.
        signature: what was seen, "" where the cause doesn't fit.
        next: the next thing to try.
    """

    name: str
    hangs: bool
    signature: Signature
    next: str


@dataclass(frozen=True)
class Finding:
    cause: str
    seen: str
    next: str


def findings(evidence: Evidence) -> list[Finding]:
    """Causes that fit, the most definite first. A server that is ready can only be found stopped or building."""
    found = []
    for cause in CAUSES:
        if cause.hangs and not evidence.alive:
            continue
        seen = cause.signature(evidence)
        if seen:
            found.append(Finding(cause.name, seen, cause.next.format(**_names(evidence))))
    return found


def _names(evidence: Evidence) -> dict[str, str]:
    stopped = " ".join(str(member.pid) for member in evidence.members if member.state in "Tt")
    return {"stopped": stopped, "model": evidence.model_path, "fs": evidence.model_fs, "table": evidence.table}


def _logged(pattern: str) -> Signature:
    """The last line of the log in which the pattern is found."""
    compiled = re.compile(pattern)

    def seen(evidence: Evidence) -> str:
        if not evidence.layer:  # a server that is ready has got over what its log tells of its start
            return ""
        return next((line[-300:] for line in reversed(evidence.log) if compiled.search(line)), "")

    return seen


def _refused(evidence: Evidence) -> str:
    told = evidence.refused
    return f"{told['seen']}; expected: {told['expected']}; {told['cause']}" if told else ""


def _stopped(evidence: Evidence) -> str:
    stopped = [f"{member.pid} ({member.name})" for member in evidence.members if member.state in "Tt"]
    return f"state T: process {', '.join(stopped)}" if stopped else ""


def _killed(evidence: Evidence) -> str:
    if evidence.exit_code == -9:
        return "the server was ended by SIGKILL"
    return _logged(r"exit ?code[ =:]*-9\b|signal 9")(evidence)


def _shared_memory(evidence: Evidence) -> str:
    if evidence.exit_code == -7:
        return "the server was ended by SIGBUS"
    return _logged(r"Bus error|exit ?code[ =:]*-7\b|[Nn]o space left on device.*shm|shm.*[Nn]o space left")(evidence)


def _building(evidence: Evidence) -> str:
    if evidence.builders:
        return f"{len(evidence.builders)} compilers at work: {', '.join(sorted(set(evidence.builders)))}"
    return _in_stack(evidence, re.compile(r"triton.*compil|compile_ttgir|make_cubin|build_and_load|ninja|\bjit\.py"))


def _reading(evidence: Evidence) -> str:
    if evidence.layer != "weights loaded":
        return ""
    waits = [member for member in evidence.members if member.state == "D" or "folio" in member.waits_in]
    if not waits and not (_in_stack(evidence, _READING) and is_network_fs(evidence.model_fs)):
        return ""
    rate = sum(member.read_bytes_s for member in evidence.members) / 1e6
    what = f"process {waits[0].pid} waits for the disk (state {waits[0].state})" if waits else "weights are being read"
    return f"{what}, {rate:.0f} MB/s; {evidence.model_path} lies on {evidence.model_fs}"


def _peers(evidence: Evidence) -> str:
    if int(evidence.flags.get("nnodes") or 1) < 2:
        return ""
    seen = _in_stack(evidence, _PEERS)
    begun = _logged(r"Init (torch distributed|parallel) begin")(evidence)
    ended = _logged(r"Init (torch distributed|parallel) ends")(evidence)
    return seen or (f"{begun}; no line says that it ended" if begun and not ended else "")


def _tuning(evidence: Evidence) -> str:
    if int(evidence.flags.get("tp_size") or 1) < 2:
        return ""
    seen = _in_stack(evidence, _TUNING)
    if not seen:
        begun, ended = _logged(r"FlashInfer autotune with|Running FlashInfer autotune")(evidence), ""
        if begun:
            ended = _logged(r"autotune completed")(evidence)
        seen = "" if ended else begun
    return seen


def _collective(evidence: Evidence) -> str:
    if int(evidence.flags.get("tp_size") or 1) < 2:
        return ""
    seen = _in_stack(evidence, _COLLECTIVE)
    if seen and evidence.links and not any(link.startswith("NV") for link in evidence.links):
        seen += f"; GPUs are connected by PCIe only ({', '.join(sorted(evidence.links))})"
    if seen and evidence.iommu:
        seen += "; an IOMMU translates the GPUs' accesses (/sys/kernel/iommu_groups: DMA)"
    return seen


def _pipeline(evidence: Evidence) -> str:
    if int(evidence.flags.get("pp_size") or 1) < 2 or evidence.layer not in ("listening", "warm"):
        return ""
    return f"pipeline parallel {evidence.flags['pp_size']}, waiting for: {evidence.layer}"


def _attention(evidence: Evidence) -> str:
    if evidence.layer not in ("listening", "warm") and not _logged("Load weight end")(evidence):
        return ""
    new = [gpu for gpu in evidence.gpus if gpu.capability >= (10, 0)]
    stack = _in_stack(evidence, _ATTENTION)
    if not new or not evidence.layer:
        return ""
    card = f"{new[0].name}, compute capability {new[0].capability[0]}.{new[0].capability[1]}"
    return f"weights are loaded, nothing listens; {card}" + (f"; {stack}" if stack else "")


def _in_stack(evidence: Evidence, pattern: re.Pattern[str]) -> str:
    """Process and innermost fitting frames of the first stack in which the pattern is found."""
    for member in evidence.members:
        for stack in member.stacks:
            frames = stack.partition(": ")[2].split(" < ")
            fitting = [frame for frame in frames if pattern.search(frame)]
            if fitting:
                return f"process {member.pid} ({member.name}) is in {fitting[0]}"
    return ""


CAUSES: tuple[Cause, ...] = (
    Cause("the tap refused this server", False, _refused, "change what it names in {table}.args or the profile"),
    Cause("a process was stopped (SIGSTOP, or ^Z)", True, _stopped, _CONTINUE),
    Cause(
        "SGLang is not in this interpreter",
        False,
        _logged(r"No module named '?sglang(\.[\w.]+)?'?"),
        "name the interpreter of SGLang's environment: --set {table}.python=PATH",
    ),
    Cause(
        "a flag that this release doesn't know",
        False,
        _logged(r"error: (unrecognized arguments|argument )"),
        "mend {table}.args; `python -m sglang.launch_server --help` in its environment lists all flags",
    ),
    Cause(
        "weights are missing or cut",
        False,
        _logged(
            r"Cannot find any model weights|SafetensorError|(incomplete|Incomplete)\w*Buffer|HeaderTooLarge|"
            r"(No such file|FileNotFoundError).*\.(safetensors|bin|pt|json)|do not appear in the checkpoint"
        ),
        "fetch the model folder again: {model}; `eyas doctor` checks its index against its files",
    ),
    Cause(
        "the GPU's memory is too small, or held by others",
        False,
        _logged(
            r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|Not enough memory\. Please|"
            r"is less than desired GPU memory utilization"
        ),
        "nvidia-smi   # shows who holds what; lower --mem-fraction-static (vLLM: --gpu-memory-utilization) by 0.05, "
        "or --chunked-prefill-size (--max-num-batched-tokens)",
    ),
    Cause(
        "the KV cache has no room for one sample",
        False,
        _logged(r"No available memory for the cache blocks|To serve at least one request with"),  # vLLM
        "lower data.max_tokens, or raise --gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE in {table}.env)",
    ),
    Cause(
        "the machine's memory is too small",
        False,
        _logged(r"MemoryError|Cannot allocate memory|can't allocate memory|Killed process \d+|oom-kill"),
        "lower capture.ring_bytes or --max-total-tokens, or end what else runs",
    ),
    Cause(
        "it was ended by SIGKILL: by the kernel, out of memory, or by somebody",
        False,
        _killed,
        "dmesg | grep -i oom   # says if it was the kernel",
    ),
    Cause(
        "/dev/shm is too small",
        False,
        _shared_memory,
        "df /dev/shm; docker run --shm-size=32g, or lower capture.ring_bytes",
    ),
    Cause(
        "a port is held by another process",
        False,
        _logged(
            r"[Aa]ddress already in use|EADDRINUSE|Port is already in use|is not available in \d+ seconds|Errno 98"
        ),
        "ss -ltnp   # says who listens; --set {table}.port=0 takes a free one",
    ),
    Cause(
        "SGLang was built for other GPUs or another driver",
        False,
        _logged(
            r"no kernel image is available|driver version is insufficient|is not compatible with the current PyTorch"
        ),
        "nvidia-smi; install the SGLang build for this driver's CUDA release",
    ),
    Cause(
        "kernels are being compiled: minutes at the first start, not a hang",
        True,
        _building,
        "wait; they are kept (~/.cache/flashinfer, ~/.triton, ~/.cache/sglang), the next start is quick",
    ),
    # sglang PR 23317, vllm 52291.
    Cause(
        "autotuning differs between ranks: one still tunes while others wait for it",
        True,
        _tuning,
        '{table}.args = ["--disable-flashinfer-autotune"]',
    ),
    Cause(
        "weights are read slowly, through a memory map from a slow or network disk",
        True,
        _reading,
        'copy {model} to a local disk, or {table}.args = ["--weight-loader-disable-mmap"]',
    ),
    Cause(
        "a node waits for its peers",
        True,
        _peers,
        "start the other nodes with the same --dist-init-addr and --nnodes, and let that port through",
    ),
    Cause(
        "pipeline parallel warms up: every stage waits for the one before",
        True,
        _pipeline,
        'wait, or {table}.args = ["--skip-server-warmup"]; capture needs --pp-size 1',
    ),
    # local-inference-lab/rtx6kpro 15 and 21, vllm 33041, NCCL 2379.
    Cause(
        "GPUs can't reach one another: NCCL peer-to-peer through an IOMMU",
        True,
        _collective,
        '{table}.env = {{ NCCL_P2P_DISABLE = "1", NCCL_CUMEM_ENABLE = "0" }} and '
        '{table}.args = ["--disable-custom-all-reduce"]; lasting: iommu=pt on the kernel\'s command line',
    ),
    Cause(
        "the attention backend hangs at its start on a new GPU",
        True,
        _attention,
        '{table}.args = ["--attention-backend", "triton"]',
    ),
)
