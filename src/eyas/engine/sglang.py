"""The command that starts an SGLang server for a recipe: flags and environment by release, and what is refused.

Releases 0.5.11 to 0.5.23. Flags come from four places: the recipe's own keys, the capture of auxiliary states, the
profile, and `engine.args`, which stand last and win where SGLang lets them.
"""

from typing import Any

from eyas.engine.client import SGLangClient
from eyas.engine.launch import NO_CAPTURE_FLAGS, Kind, Launch, check_own_flags, profile_flags, server_device
from eyas.engine.profile import load_profile
from eyas.run import Run
from eyas.tap import releases
from eyas.tap.refuse import ARGUMENTS
from eyas.tap.releases import Release
from eyas.target import Target

RID_PREFIX = "eyas-"
_OFFICIAL_CAPTURE_FROM = (0, 5, 23)
# Models of 0.5.23 with `set_dflash_layers_to_capture`, which adds 1 to every id for all of these; Qwen2 has only the
# EAGLE-3 one, which adds 1 too. (That of DeepSeek takes ids as they are: models/deepseek_v2.py.)
_CONVENTION = dict.fromkeys(
    ("llama", "mistral", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "gpt_oss"), "DFLASH"
) | {"qwen2": "EAGLE3"}

# Flags that the recipe says elsewhere: argument -> key; of [engine], or of [serving] in its place.
OWN_FLAGS = {
    "--model-path": "target.path",
    "--model": "target.path",
    "--trust-remote-code": "target.trust_remote_code",
    "--dtype": "{table}.dtype",
    "--device": "engine.device",
    "--host": "{table}.host",
    "--port": "{table}.port",
    "--config": "{table}.args, one by one: what a file of flags holds can't be checked beforehand",
    "--enable-return-aux-hidden-states": "drafter.aux_layer_ids",
    "--return-aux-hidden-state-layer-ids": "drafter.aux_layer_ids",
}

# Values under which a row's states are wrong or missing, as the server's own parser names them: what is allowed, why.
# The tap refuses its part too, once SGLang has decided what was left open. (The speculative algorithm is looked at
# there alone: on 0.5.23's command line its name chooses the capture's convention.)
WRONG_FOR_CAPTURE: dict[str, tuple[Any, str]] = {
    name: (wanted, reason) for name, wanted, reason in ARGUMENTS if name != "speculative_algorithm"
} | {
    "enable_mixed_chunk": (False, "decode steps would be mixed into the prefill that is captured"),
    "dcp_size": (1, "with context parallel each rank holds a part of the rows"),
    "nnodes": (1, "the tap would be missing on the other machines"),
    "speculative_draft_model_path": (None, "a drafter's forward passes are none of the target's"),
    "disaggregation_mode": ("null", "prefill and decode would run on two servers"),
    "is_embedding": (False, "an embedding server has no lm_head"),
    "cuda_graph_backend_prefill": ("disabled", "Python, and so the tap, does not run when a graph is replayed"),
    "disable_radix_cache": (True, "a cached prefix is not computed again: its rows would be missing"),
}


# What the server's parser makes of a command line; `tell` is defined before it.
_PARSER = """
import argparse
from sglang.srt.server_args import ServerArgs

class Parser(argparse.ArgumentParser):
    def error(self, message):
        tell(error=message)
        sys.exit(0)

parser = Parser()
ServerArgs.add_cli_args(parser)
values, unknown = parser.parse_known_args(sys.argv[1:])
tell(values=vars(values), unknown=unknown, known=sorted(parser._option_string_actions))
"""


def plan_launch(run: Run, target: Target, version: str) -> Launch:
    """The command for one release. Nothing is looked at but the recipe and whether this machine has a GPU.

    Raises: EngineError for a release that is not known; RecipeError for a flag that another key says, or a
        device that a server can't be given.
    """
    table, release = run.recipe.engine, SGLANG.check_release(version, run.engine_table)
    profile = load_profile(table.profile, run.engine_table)
    capture, device = profile.purpose == "capture", server_device(table)
    check_own_flags(OWN_FLAGS | NO_CAPTURE_FLAGS if capture else OWN_FLAGS, table.args, run.engine_table)
    flags = ["--model-path", str(target.path), "--dtype", table.dtype, "--random-seed", "0"]
    flags += ["--trust-remote-code"] if target.trust_remote_code else []
    flags += ["--device", device] if device else []
    if device == "cpu":
        # By itself SGLang on a CPU takes most memory for its KV cache and 16 s to clear it.
        flags += ["--max-total-tokens", str(max(16384, 4 * run.recipe.data.max_tokens))]
    flags += profile_flags(profile, "sglang", release) + table.args
    ids = target.aux_layer_ids(run.recipe.drafter.aux_layer_ids)
    aux = aux_flags(ids, target.model_type, release) if capture else []
    env = profile.env_for("sglang") | dict(table.env)
    told = {"rid_prefix": RID_PREFIX, "official_flag": bool(aux)}
    return Launch(
        SGLANG, table.python, version, release, profile, device, table.host, flags + aux, env, told, 0, run.engine_table
    )


def aux_flags(aux_layer_ids: list[int], model_type: str, release: Release) -> list[str]:
    """Flags that make SGLang collect auxiliary states itself; none where the tap has to switch it on.

    Args:
        aux_layer_ids: in our meaning: id i = residual stream after i decoder layers.
    """
    # The flag takes no negative ids, so the embeddings (id 0, their -1) are left to the tap.
    if release < _OFFICIAL_CAPTURE_FROM or model_type not in _CONVENTION or aux_layer_ids[0] == 0:
        return []
    theirs = [str(layer - 1) for layer in aux_layer_ids]
    flags = ["--enable-return-aux-hidden-states", "--speculative-algorithm", _CONVENTION[model_type]]
    return [*flags, "--return-aux-hidden-state-layer-ids", *theirs]


SGLANG = Kind(
    name="sglang",
    releases=releases.SGLANG,
    entry=("-m", "sglang.launch_server"),
    model_after="--model-path",
    wrong_for_capture=WRONG_FOR_CAPTURE,
    parser=_PARSER,
    checked_import="sglang.srt.server_args",
    ranks="tp_size",
    stages="pp_size",
    memory_share="mem_fraction_static",
    loaded_event="weights",  # under --enable-return-aux-hidden-states `layers` comes at the first pass, of rank 0 alone
    weights_line="Load weight end",
    ready_line="The server is fired up and ready to roll",
    client=lambda url, events: SGLangClient(url),
    plan_launch=plan_launch,
)
