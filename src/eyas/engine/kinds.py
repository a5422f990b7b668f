"""The engines that have servers."""

from eyas.engine.launch import Kind
from eyas.engine.sglang import SGLANG
from eyas.engine.vllm import VLLM

KINDS: dict[str, Kind] = {kind.name: kind for kind in (SGLANG, VLLM)}
