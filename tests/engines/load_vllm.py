"""Run by vLLM's interpreter: load drafter folders with vLLM's own loader and print what it made of them, as JSON.

Argument: JSON of name -> {"model": target or speculators folder, "draft": folder or ""}.
"""

import hashlib
import json
import sys
from collections.abc import Iterable

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

torch.accelerator.empty_cache = lambda: None  # vLLM's CPU worker does the same: there is no accelerator to ask
loaded: dict[str, str] = {}
load_weights = Eagle3LlamaForCausalLM.load_weights


def load_and_note(self: Eagle3LlamaForCausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Digests of the parameters as loaded: afterwards matrices are packed anew for the CPU."""
    load_weights(self, weights)
    rows = {"lm_head.weight": self.config.draft_vocab_size, "model.embed_tokens.weight": self.config.vocab_size}
    loaded.clear()
    loaded.update({name: digest(value[: rows.get(name)]) for name, value in self.named_parameters()})


Eagle3LlamaForCausalLM.load_weights = load_and_note


def load(model: str, draft: str) -> dict:
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": 3} if draft else None
    arguments = EngineArgs(model=model, enforce_eager=True, max_model_len=64, speculative_config=speculative)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:29555", 0, "gloo")
            initialize_model_parallel(1, 1)
        speculative = config.speculative_config
        drafter = get_model(vllm_config=config, model_config=speculative.draft_model_config)
    found, inner = speculative.draft_model_config.hf_config, drafter.model
    eagle = getattr(found, "eagle_config", None) or {}
    return {
        "params": dict(loaded),
        "fc_norm": inner.fc_norm is not None,
        "norm_output": inner.norm_output,
        "norm_before_fc": inner.norm_before_fc,
        "norm_before_residual": inner.layers[0]._residual_norm.__name__ == "_norm_before_residual",
        "sliding_window": inner.layers[0].self_attn.attn.sliding_window or 0,
        # As gpu_model_runner.py and eagle3_utils.py take them: the top-level key first.
        "captures": getattr(found, "eagle_aux_hidden_state_layer_ids", None)
        or eagle.get("eagle_aux_hidden_state_layer_ids"),
        "rope": found.rope_parameters,
        "own_embedding": drafter.has_own_embed_tokens,
        "target": config.model_config.model,
        "drafts": speculative.num_speculative_tokens,
    }


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


results = {}
for name, folders in json.loads(sys.argv[1]).items():
    try:
        results[name] = load(**folders)
    except (ValueError, RuntimeError, KeyError, OSError, AssertionError) as error:
        results[name] = {"error": f"{type(error).__name__}: {error}"}
print("RESULT" + json.dumps(results))
