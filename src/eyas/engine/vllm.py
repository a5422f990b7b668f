"""The command that starts a vLLM server for a recipe: flags and environment, and what is refused.

Releases 0.27.0 to 0.33.0, in which all that the tap stands on is the same (tap/vllm.py): before, a connector couldn't
ask which KV cache holds the states. Run here: 0.27.0 and 0.32.0 on a CPU; the others were read.
"""

import json
import os
from typing import Any

from eyas.engine.launch import NO_CAPTURE_FLAGS, Kind, Launch, check_own_flags, has_gpu, profile_flags, server_device
from eyas.engine.partial import final_norm
from eyas.engine.profile import load_profile
from eyas.engine.vllm_client import VLLMClient
from eyas.errors import EngineError, RecipeError
from eyas.run import Run
from eyas.tap import releases
from eyas.target import Target

PLUGIN = "eyas_tap"
# Tokens of context beside the longest prompt: one that is emitted, and some for steps that vLLM schedules ahead. In a
# step with a sequence that reaches the end of the context the states of the whole batch are left out.
_MARGIN = 8
# Multi-head latent attention: vLLM then puts the states into one group of caches with the layers', where its connector
# can't find them (0.27.0 to 0.33.0, `_find_cache_kv_group_id`).
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")

OWN_FLAGS = {
    "--model": "target.path",
    "--trust-remote-code": "target.trust_remote_code",
    "--dtype": "{table}.dtype",
    "--host": "{table}.host",
    "--port": "{table}.port",
    "--config": "{table}.args, one by one: what a file of flags holds can't be checked beforehand",
}
CAPTURE_FLAGS = {
    "--max-model-len": "data.max_tokens",
    "--speculative-config": "drafter.aux_layer_ids",
    "--kv-transfer-config": "engine.kind and engine.profile",
}
WRONG_FOR_CAPTURE: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "each stage would need a ring of its own"),
    "data_parallel_size": (1, "each replica would need a ring of its own"),
    "decode_context_parallel_size": (1, "the rows of a prompt are spread over ranks"),
    "prefill_context_parallel_size": (1, "the rows of a prompt are spread over ranks"),
    "nnodes": (1, "the tap would be missing on the other machines"),
    "enable_dbo": (False, "steps that run as two half batches were never compared"),
}
# What the server's parser makes of a command line; `tell` is defined before it.
_PARSER = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

def error(self, message):
    unknown = message.startswith("unrecognized arguments: ") and message.split()[2:]
    tell(**({"unknown": unknown, "known": known} if unknown else {"error": message}))
    sys.exit(0)

parser = FlexibleArgumentParser()
serve = ServeSubcommand().subparser_init(parser.add_subparsers())
known = sorted(serve._option_string_actions)
FlexibleArgumentParser.error = error
tell(values=vars(parser.parse_args(["serve", *sys.argv[1:]])), unknown=[], known=known)
"""


def plan_launch(run: Run, target: Target, version: str) -> Launch:
    """The command for one release. Nothing is looked at but the recipe, the target's files and whether this machine
    has a GPU.

    Raises: EngineError for a release that is not known or a family that vLLM can't give states of; RecipeError
        for a flag that another key says, or samples longer than the target's context; TargetError.
    """
    table, release = run.recipe.engine, VLLM.check_release(version, run.engine_table)
    profile = load_profile(table.profile, run.engine_table)
    capture, device = profile.purpose == "capture", server_device(table)
    check_own_flags(
        OWN_FLAGS | CAPTURE_FLAGS | NO_CAPTURE_FLAGS if capture else OWN_FLAGS, table.args, run.engine_table
    )
    flags = [str(target.path), "--dtype", table.dtype, "--seed", "0"]
    flags += ["--trust-remote-code"] if target.trust_remote_code else []
    flags += ["--max-model-len", str(context_tokens(run, target))] if capture else []
    flags += profile_flags(profile, "vllm", release) + table.args
    env = profile.env_for("vllm") | dict(table.env)
    # Restricted to the plugins that are named, vLLM would leave the tap's out.
    plugins = ({**os.environ} | env).get("VLLM_PLUGINS")
    env |= {"VLLM_PLUGINS": f"{plugins},{PLUGIN}"} if capture and plugins else {}
    cache = 0
    if device == "cpu":
        cache = cache_bytes(run, target)
        # By itself vLLM on a CPU takes a share of all memory for its KV cache, and leaves cores unused.
        env = {"VLLM_CPU_KVCACHE_SPACE": str(cache >> 30), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"} | env
        # A build for GPUs would take one: it has no flag for the device.
        env |= {"CUDA_VISIBLE_DEVICES": ""} if has_gpu() else {}
    told: dict[str, Any] = {}
    if capture:
        ids = target.aux_layer_ids(run.recipe.drafter.aux_layer_ids)
        flags += capture_flags(target, ids)
        path, tensor, eps = final_norm(target)
        told = {"norm_file": str(path), "norm_tensor": tensor, "norm_eps": eps}
    at = table.python, version, release, profile, device, table.host
    return Launch(VLLM, *at, flags, env, told, cache, run.engine_table)


def capture_flags(target: Target, aux_layer_ids: list[int]) -> list[str]:
    """What makes vLLM collect states and hand them to the tap.

    Args:
        aux_layer_ids: in our meaning, which is vLLM's own; the stream after the last layer is added.
    Raises: EngineError where vLLM has no states of this family.
    """
    if target.model_type in _LATENT:
        raise EngineError(
            f"model_type {target.model_type!r} with vLLM",
            expected="a family whose states vLLM can hand over",
            cause=f"with multi-head latent attention vLLM's connector doesn't find them ({releases.VLLM})",
            next="--set engine.kind=sglang, with an interpreter that holds SGLang",
        )
    layers = {"eagle_aux_hidden_state_layer_ids": [*aux_layer_ids, target.num_layers]}
    drafter = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    connector = {
        "kv_connector": "EyasConnector",
        "kv_connector_module_path": f"{PLUGIN}.vllm",
        "kv_role": "kv_producer",
    }
    return ["--speculative-config", json.dumps(drafter), "--kv-transfer-config", json.dumps(connector)]


def context_tokens(run: Run, target: Target) -> int:
    """The server's context: the longest sample and a margin, as far as the target's goes.

    Raises: RecipeError where samples may be longer than it takes.
    """
    longest, limit = run.recipe.data.max_tokens, int(target.text_config.get("max_position_embeddings") or 0)
    if limit and longest >= limit:
        raise RecipeError(
            f"data.max_tokens = {longest} with vLLM and a target of {limit} positions",
            expected=f"at most {limit - 1}: vLLM takes a prompt only where a token can follow it",
            next=f"--set data.max_tokens={limit - 1}",
        )
    return min(longest + _MARGIN, limit) if limit else longest + _MARGIN


def cache_bytes(run: Run, target: Target) -> int:
    """Main memory for the KV cache of a server on a CPU: 16k tokens or four longest samples, whole GiB."""
    config, width = target.text_config, 4 if run.recipe.engine.dtype == "float32" else 2
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or target.hidden_size // heads)
    keys = target.num_layers * 2 * int(config.get("num_key_value_heads") or heads) * head_dim
    tokens = max(16384, 4 * run.recipe.data.max_tokens)
    return -(-tokens * (keys + 4 * target.hidden_size) * width >> 30) << 30


VLLM = Kind(
    name="vllm",
    releases=releases.VLLM,
    entry=("-m", "vllm.entrypoints.cli.main", "serve"),
    model_after="serve",
    wrong_for_capture=WRONG_FOR_CAPTURE,
    parser=_PARSER,
    checked_import="vllm.entrypoints.cli.serve",
    ranks="tensor_parallel_size",
    stages="pipeline_parallel_size",
    memory_share="gpu_memory_utilization",
    loaded_event="layers",
    weights_line="Loading weights took",
    ready_line="Application startup complete",
    client=VLLMClient,
    plan_launch=plan_launch,
)
