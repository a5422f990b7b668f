"""A server that doesn't get on, or has ended: what it does, which known cause fits, what to try next."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from eyas.engine.causes import Finding, findings
from eyas.engine.evidence import Evidence, Member, examine
from eyas.engine.kinds import KINDS
from eyas.engine.launch import Kind
from eyas.errors import EngineError
from eyas.progress import duration, size

# pydantic's message has its reason on the next line.
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): (?!\d+ validation error)\S|^\s*Value error, ")
_FRAMES = 6
_LOG_SHOWN = 8


def evidence_lines(evidence: Evidence) -> list[str]:
    """What was gathered, for people."""
    lines = [_member_line(member) for member in evidence.members] or ["process   none lives"]
    for member in evidence.members:
        lines += [f"stack     {member.pid} {_shortened(stack)}" for stack in _telling(member)]
    if evidence.stacks_note:
        lines.append(f"stack     {evidence.stacks_note}")
    if evidence.exit_code is not None:
        lines.append(f"exit      code {evidence.exit_code}" + (" (a signal)" if evidence.exit_code < 0 else ""))
    for gpu in evidence.gpus:
        held = f"{size(gpu.used_bytes)} of {size(gpu.total_bytes)}"
        lines.append(f"GPU {gpu.index}     {gpu.name}: {held} held, busy {gpu.busy:.0%}")
    lines += [f"GPU       {evidence.gpu_note}"] if evidence.gpu_note else []
    if evidence.members:
        lines.append(f"ports     {', '.join(map(str, evidence.listening)) or 'none listened on'}")
    if evidence.layer:
        lines.append(f"waits     for: {evidence.layer}")
    if evidence.log_age_s is not None:
        lines.append(f"log       last written {duration(evidence.log_age_s)} ago; it ends:")
        lines += [f"          {line[:300]}" for line in evidence.log[-_LOG_SHOWN:]]
    return lines


def finding_lines(found: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in found:
        lines += [f"cause     {finding.cause}", f"  seen    {finding.seen}", f"  next    {finding.next}"]
    return lines


def as_error(evidence: Evidence, seen: str, log: Path, doctor: str) -> EngineError:
    """The most definite cause as an error.

    Args:
        seen: what happened, such as "SGLang ended while waiting for: weights loaded".
        doctor: the command that shows more.
    """
    found = findings(evidence)
    lines = "\n  ".join(line[:300] for line in evidence.log[-_LOG_SHOWN:])
    text = f"{seen}; its log ({log}) ends:\n  {lines or 'with nothing in it'}"
    if not found:
        error = first_error(evidence.log)
        cause = "none of the known ones" + (f"; the first error in its log: {error}" if error else "")
        return EngineError(text, cause=cause, next=f"{doctor}, or read the whole log: less {log}")
    others = "".join(f"\n  or {other.cause}: {other.seen}; next: {other.next}" for other in found[1:3])
    return EngineError(text, cause=f"{found[0].cause}: {found[0].seen}{others}", next=found[0].next)


def first_error(log: Sequence[str]) -> str:
    """The first exception in a log: vLLM tells it in one process after the other, and the last only that it failed."""
    return next((line[-300:] for line in log if _ERROR.search(line) and "WARNING" not in line), "")


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants, in whatever session they are."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def log_of(pid: int) -> Path | None:
    """The file that a process' output goes to, where it is one."""
    for number in (1, 2):
        try:
            path = Path(os.readlink(f"/proc/{pid}/fd/{number}"))  # noqa: PTH115
        except OSError:
            continue
        if path.is_file():
            return path
    return None


def examine_pid(pid: int) -> Evidence:
    """Any server and what it started; what it serves is read from its command line, how far it got from its log.

    Raises: EngineError where there is no such process.
    """
    try:
        processes = tree(pid)
        words = processes[0].cmdline()
    except psutil.NoSuchProcess:
        raise EngineError(f"no process {pid}", next="ps -ef | grep -e sglang -e vllm") from None
    kind = next((kind for kind in KINDS.values() if any(kind.name in word for word in words)), KINDS["sglang"])
    names = ("--model-path", "--model", kind.model_after)
    model = next((words[at + 1] for at, word in enumerate(words[:-1]) if word in names), "")
    flags = {name: _flag(words, spellings) for name, spellings in _FLAGS.items()}
    log, python = log_of(pid), words[0] if words else ""
    layer = _layer(kind, log.read_text(encoding="utf-8", errors="replace")) if log else ""
    return examine(processes, log=log, layer=layer, engine_python=python, model_path=model, flags=flags)


def _layer(kind: Kind, log: str) -> str:
    """What a server waits for, by the lines of its log."""
    steps = {"weights loaded": kind.weights_line, "listening": "Application startup complete", "warm": kind.ready_line}
    return next((layer for layer, line in steps.items() if line not in log), "")


_FLAGS = {
    "tp_size": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "pp_size": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "nnodes": ("--nnodes",),
}


def _flag(words: Sequence[str], spellings: Sequence[str]) -> int:
    """The last value of a flag that is a number; 1 without one."""
    for at in range(len(words) - 1, -1, -1):
        name, equals, value = words[at].partition("=")
        if name in spellings:
            value = value if equals else (words[at + 1] if at + 1 < len(words) else "")
            return int(value) if value.isdigit() else 1
    return 1


def flags_of(command: Sequence[str]) -> dict[str, int]:
    """What causes ask of a command line."""
    return {name: _flag(command, spellings) for name, spellings in _FLAGS.items()}


def _member_line(member: Member) -> str:
    waits = f", in {member.waits_in}" if member.waits_in and member.state in "SD" else ""
    states = {
        "R": "runs",
        "S": "sleeps",
        "D": "waits for a disk",
        "T": "is stopped",
        "t": "is being traced",
        "Z": "dead",
    }
    doing = f"{states.get(member.state, member.state)}{waits}, {member.cores:.1f} cores, {member.threads} threads"
    return f"process   {member.pid} {member.name}: {doing}, reads {member.read_bytes_s / 1e6:.0f} MB/s"


def _telling(member: Member) -> list[str]:
    """The main thread's stack, or the first; a hundred idle pool threads tell nothing."""
    main = [stack for stack in member.stacks if stack.startswith("MainThread")]
    return main or list(member.stacks[:1])


def _shortened(stack: str) -> str:
    frames = stack.split(" < ")
    return " < ".join(frames[:_FRAMES]) + (" < ..." if len(frames) > _FRAMES else "")
