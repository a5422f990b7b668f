"""Runs where SpecForge is installed: its own listing, loading and normalising of a folder of features.

    python specforge_read.py FOLDER OUT

OUT gets samples.safetensors, each sample as its trainer takes it, named by the number of its file.
"""

import sys
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save_file
from specforge.algorithms.eagle3.data import build_offline_normalizer
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

folder, out = sys.argv[1], Path(sys.argv[2])
normalize = build_offline_normalizer(4096)
tensors = {}
references = OfflineManifestReader(folder, max_len=4096, validate_files=True).read()
for reference in references:
    path = reference.feature_store_uri.removeprefix("file://")
    number = Path(path).name.split(".")[0].removeprefix("data_")
    for key, value in normalize(load_feature_file(path)).items():
        tensors[f"{number}.{key}"] = value.contiguous()
save_file(tensors, out / "samples.safetensors")
print(f"SpecForge {version('specforge')}: {len(references)} samples")
