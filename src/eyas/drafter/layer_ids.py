"""Layer ids as each engine reads them. Eyas has one meaning: id i = the residual stream after i decoder layers.

That is what vLLM means too. SGLang calls it "entering layer i" and, for most model families, adds 1 to the ids of a
drafter's config before it captures; DeepSeek's class (Kimi too) stopped adding it in 0.5.13 unless the first id is 1
(PR 25454); gpt-oss takes ids as they are, from 0.5.17, where the largest is the number of layers. Read in the
`set_eagle3_layers_to_capture` of SGLang 0.5.14 and 0.5.23; in between by release notes and PR dates.
"""

from collections.abc import Sequence

from eyas.errors import ExportError
from eyas.tap.releases import SGLANG, Release

_DEEPSEEK_RAW_FROM = (0, 5, 13)
_GPT_OSS_LAST_RAW_FROM = (0, 5, 17)
_ADDS_ONE = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
_DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"})


def vllm_layer_ids(aux_layer_ids: Sequence[int]) -> list[int]:
    """Our ids as vLLM reads them: unchanged."""
    return list(aux_layer_ids)


def sglang_layer_ids(aux_layer_ids: Sequence[int], model_type: str, version: str, num_layers: int) -> list[int]:
    """Our ids as SGLang's `eagle_config.eagle_aux_hidden_state_layer_ids` must hold them.

    Args:
        aux_layer_ids: three rising ids in our meaning.
        model_type: `model_type` of the target's config.json (of the wrapper, where there is one).
        version: SGLang release, 0.5.11 to 0.5.23.
        num_layers: decoder layers of the target.
    Returns: ids whose capture in that release is `aux_layer_ids`. An id 0 (embeddings) becomes -1 where 1 is added;
        Llama of releases before 0.5.21 stops at the first forward with it.
    Raises: ExportError for a release or model family whose rule isn't known.
    """
    ours = list(aux_layer_ids)
    if model_type in _DEEPSEEK and sglang_release(version) >= _DEEPSEEK_RAW_FROM:
        # A list that starts with 1 would be shifted. Layers are captured in their own order whatever the list's.
        return ours if ours[0] != 1 else [*ours[1:], ours[0]]
    if model_type == "gpt_oss" and sglang_release(version) >= _GPT_OSS_LAST_RAW_FROM and ours[-1] == num_layers:
        return ours
    _refuse_unknown(model_type, version)
    return [layer - 1 for layer in ours]


def sglang_captures(listed: Sequence[int], model_type: str, version: str, num_layers: int) -> list[int]:
    """The inverse, for checking a folder: which residual streams SGLang captures for the ids in `eagle_config`."""
    release = sglang_release(version)
    ids = list(listed)
    _refuse_unknown(model_type, version)
    if model_type in _DEEPSEEK and release >= _DEEPSEEK_RAW_FROM:
        raw = not ids or ids[0] != 1
    else:
        raw = model_type == "gpt_oss" and release >= _GPT_OSS_LAST_RAW_FROM and max(ids, default=0) == num_layers
    return sorted(ids if raw else [layer + 1 for layer in ids])


def sglang_release(text: str) -> Release:
    """ "0.5.13.post1" -> (0, 5, 13). Raises ExportError outside 0.5.11 to 0.5.23."""
    release = SGLANG.find(text)
    if release is None:
        raise ExportError(
            f"export.sglang_version = {text!r}",
            expected=f"{SGLANG}: the releases whose layer-id rules are known",
            next="--set export.sglang_version=0.5.23, and serve with that release",
        )
    return release


def _refuse_unknown(model_type: str, version: str) -> None:
    """Refuse what no rule is known for."""
    sglang_release(version)
    if model_type not in _ADDS_ONE | _DEEPSEEK | {"gpt_oss"}:
        raise ExportError(
            f"target of model_type {model_type!r}: how SGLang reads layer ids for it is not known",
            expected=f"one of {', '.join(sorted(_ADDS_ONE | _DEEPSEEK | {'gpt_oss'}))}",
            cause="a model family that was added to eyas.target without its rule in eyas.drafter.layer_ids",
        )
