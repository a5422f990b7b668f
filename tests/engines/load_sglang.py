"""Run by SGLang's interpreter: load drafter folders into SGLang's own class and print what it made of them, as JSON.

Argument: JSON of name -> {"model": target, "draft": folder}.
"""

import hashlib
import json
import sys

import sglang.srt.runtime_context as context
import torch
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

UNTOUCHED = 7.0


def load(draft: str) -> dict:
    config = AutoConfig.from_pretrained(draft)
    if config.architectures != ["LlamaForCausalLMEagle3"]:
        raise ValueError(f"no model class for {config.architectures}")
    torch.set_default_dtype(torch.bfloat16)
    drafter = LlamaForCausalLMEagle3(config)
    for value in drafter.parameters():
        value.data.fill_(UNTOUCHED)
    drafter.load_weights(load_file(f"{draft}/model.safetensors").items())
    eagle = config.eagle_config or {}
    rows = {"lm_head.weight": config.draft_vocab_size, "model.embed_tokens.weight": config.vocab_size}
    return {
        "params": {name: digest(value[: rows.get(name)]) for name, value in drafter.named_parameters()},
        "left": [name for name, value in drafter.named_parameters() if bool((value == UNTOUCHED).all())],
        "hot": None if drafter.hot_token_id is None else drafter.hot_token_id.tolist(),
        "fc_norm": drafter.model.fc_norm is not None,
        "norm_output": drafter.model.norm_output,
        "norm_before_fc": drafter.model.input_norm is not None,
        "nested": eagle.get("eagle_aux_hidden_state_layer_ids"),
        "rope": config.rope_parameters,
        "head_from_target": drafter.load_lm_head_from_target,
    }


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


wanted = json.loads(sys.argv[1])
arguments = ServerArgs(model_path=next(iter(wanted.values()))["model"], device="cpu", disable_overlap_schedule=True)
context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=0))
init_distributed_environment(1, 0, "tcp://127.0.0.1:29556", 0, "gloo")
initialize_model_parallel("gloo")
results = {}
for name, folders in wanted.items():
    try:
        results[name] = load(folders["draft"])
    except (ValueError, RuntimeError, KeyError, AttributeError, AssertionError) as error:
        results[name] = {"error": f"{type(error).__name__}: {error}"}
print("RESULT" + json.dumps(results))
