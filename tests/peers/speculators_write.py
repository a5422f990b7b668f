"""Runs inside speculators' own environment: a data set saved by `datasets` in three files, states in its fp8.

    python speculators_write.py FOLDER OUT

FOLDER is read and OUT is written by the libraries that speculators 0.9 uses for both.
"""

import sys
from pathlib import Path

from datasets import load_from_disk
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
rows = load_from_disk(folder)
rows.save_to_disk(out, num_shards=3)
(out / "hidden_states").mkdir()
for row in range(len(rows)):
    name = f"hidden_states/hs_{row}.safetensors"
    tensors = load_file(folder / name)
    tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(tensors["hidden_states"])
    save_file(tensors, out / name)
print(f"{len(rows)} rows in {len(list(out.glob('*.arrow')))} files")
