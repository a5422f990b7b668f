"""Named data sets: where they lie on the hub, which of their files are used, and the shape of their records."""

from pathlib import Path
from typing import NamedTuple

from eyas.errors import DataError


class Preset(NamedTuple):
    """A data set.

    Attributes:
        repo: data set repository on the hub.
        files: glob of the files used, in the repository and below a local folder alike.
        shape: of its records (shapes.py).
        about: size and kind, for people.
    """

    repo: str
    files: str
    shape: str
    about: str


PRESETS = {
    "ultrachat-200k": Preset(
        "HuggingFaceH4/ultrachat_200k", "data/train_sft-*.parquet", "messages", "208k multi-turn chats"
    ),
    "sharegpt": Preset(
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        "conversations",
        "94k chats of people with ChatGPT",
    ),
    "open-perfectblend": Preset(
        "mlabonne/open-perfectblend", "data/train-*.parquet", "conversations", "1.4M chats, mathematics and code"
    ),
    "magpie": Preset(
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "data/train-*.parquet",
        "conversations",
        "300k instructions that a model made up",
    ),
    "openthoughts": Preset(
        "open-thoughts/OpenThoughts-114k", "data/train-*.parquet", "conversations", "114k answers with reasoning"
    ),
    "tulu-3": Preset("allenai/tulu-3-sft-mixture", "data/train-*.parquet", "messages", "939k records of many sources"),
    "opencodeinstruct": Preset("nvidia/OpenCodeInstruct", "data/train-*.parquet", "pair", "5M programming tasks"),
    "codealpaca": Preset("sahil2801/CodeAlpaca-20k", "code_alpaca_20k.json", "pair", "20k programming tasks"),
    "gsm8k": Preset("openai/gsm8k", "main/train-*.parquet", "pair", "7.5k grade school problems"),
    "lmsys-chat-1m": Preset(
        "lmsys/lmsys-chat-1m", "data/train-*.parquet", "conversations", "1M real chats (licence to be accepted first)"
    ),
}


def fetch(name: str, revision: str) -> str:
    """Glob of a preset's files in the local hub cache, fetched first where they aren't there.

    Raises: DataError at once where the hub can't be reached or refuses, saying how to go local.
    """
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    preset = PRESETS[name]

    def folder(local: bool) -> str:
        return str(
            snapshot_download(
                preset.repo,
                repo_type="dataset",
                revision=revision or None,
                allow_patterns=preset.files,
                local_files_only=local,
                etag_timeout=10,
            )
        )

    try:
        try:
            found = folder(local=True)
        except LocalEntryNotFoundError:
            found = folder(local=False)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"preset {name}: {preset.repo} can't be fetched from the hub: {reason}",
            expected="the hub, or the data set in the local hub cache",
            cause="no network, HF_HUB_OFFLINE is set, or the data set's licence was not accepted",
            next=f"where there is a network: hf download --repo-type dataset {preset.repo} --include '{preset.files}' "
            '--local-dir DIR; then set path = "DIR" beside preset',
        ) from None
    return str(Path(found) / preset.files)


def local_files(name: str, path: str) -> str:
    """Glob of a preset's files below a local folder; a file or a glob stays as it is."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    pattern = folder / PRESETS[name].files
    return str(pattern) if any(folder.glob(PRESETS[name].files)) else path
