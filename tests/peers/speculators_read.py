"""Runs inside speculators' own environment: its loaders read a folder, its model computes targets and a loss from it.

    python speculators_read.py FOLDER TARGET OUT

OUT gets two safetensors files: `samples`, each sample as its data set gives it, in the order of its files, and `batch`,
the first packed training batch with the target's distribution over the next token and the loss of one forward.
"""

import inspect
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import data
from speculators.train.dataloader import create_train_val_loaders
from transformers import AutoConfig

torch.set_num_threads(1)
folder, target, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
legacy = (Path(folder) / "data_0.pt").is_file()
config = AutoConfig.from_pretrained(target)

if legacy:
    paths = sorted(data.list_files(folder), key=lambda path: int(path.stem.removeprefix("data_")))
    dataset = data.SampleFileDataset(max_len=256, file_list=paths)
else:
    dataset = data.ArrowDataset(max_len=256, datapath=folder, on_missing="raise")
samples = {f"{row}.{key}": value for row in range(len(dataset)) for key, value in dataset[row].items()}
samples["approx_lengths"] = torch.tensor(dataset.approx_lengths)
save_file({key: value.contiguous() for key, value in samples.items()}, out / "samples.safetensors")

# Their options changed names between versions; those that a version doesn't have are left out.
options = {
    "data_path": folder,
    "total_seq_len": 256,
    "hidden_states_dtype": torch.bfloat16,
    "noise_std": 0.0,
    "legacy_data": legacy,
    "vllm_endpoint": "http://127.0.0.1:9/v1",
    "on_missing": "raise",
    "on_generate": "delete",
    "verifier_name_or_path": target,
    "request_timeout": 1.0,
    "max_retries": 0,
    "generation_validation_retries": 0,
    "max_consecutive_generation_failures": 1,
    "hidden_size": config.hidden_size,
    "num_target_layers": 3,
    "num_workers": 0,
    "prefetch_factor": 1,
    "preprocess": shift_batch,
    "train_data_ratio": 0.9,
}
known = inspect.signature(create_train_val_loaders).parameters
loader, _ = create_train_val_loaders(**{key: value for key, value in options.items() if key in known})
batch = next(iter(loader))

model = Eagle3DraftModel.from_training_args(
    AutoConfig.from_pretrained(target),
    verifier_name_or_path=target,
    draft_vocab_size=config.vocab_size,
    norm_before_residual=True,
    target_layer_ids=None,
    ttt_steps=3,
    draft_attn_impl="eager",
).to(torch.bfloat16)
with torch.no_grad():
    logits = model.verifier_lm_head(model.verifier_norm(batch["verifier_last_hidden_states"]))
tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
# The fused losses of 0.8 and later need a GPU.
training, _ = model.get_trainer_kwargs(
    loss_fn="kl_div", loss_implementation="eager", ttt_steps=3, ttt_step_loss_decay=1.0
)
_, loss, _ = model(**tensors, **training)
loss.backward()
tensors |= {"target_probabilities": logits.float().softmax(-1), "loss": loss.detach()}
tensors["gradient"] = model.fc.weight.grad.norm()
save_file({key: value.contiguous() for key, value in tensors.items()}, out / "batch.safetensors")
print(f"speculators {version('speculators')}: {len(dataset)} samples, loss {float(loss.detach()):.4f}")
