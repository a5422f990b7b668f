"""Run in speculators' environment: load a drafter's folder with speculators' own class, draft, and save it again.

Arguments: the folder; a safetensors file with `aux` float32 [T, 3H] and `ids` int64 [T]; the number of steps; where the
drafts go (safetensors, `drafts` int64 [steps, T - 1], draft ids by argmax); a folder for the model as it saves it.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel

folder, inputs, steps, drafts, saved = sys.argv[1:]
model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
model.config.transformer_layer_config._attn_implementation = "eager"
model._attn_impl = "eager"
from speculators.models.attention import create_float_mask  # noqa: E402

model._create_mask_fn = create_float_mask
model.eval()
given = load_file(inputs)
# As speculators aligns a sample: the state at i beside token i + 1.
hidden, ids = given["aux"][None, :-1], given["ids"][None, 1:]
with torch.no_grad():
    tokens = model(hidden, ids, torch.zeros_like(ids), ttt_steps=int(steps))
save_file({"drafts": torch.cat(tokens).contiguous()}, drafts)
model.save_pretrained(saved)
