"""Every table of the recipe and its keys. The descriptions are the reference: `eyas init` writes them as comments."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]


Preset = Literal[
    "",
    "ultrachat-200k",
    "sharegpt",
    "open-perfectblend",
    "magpie",
    "openthoughts",
    "tulu-3",
    "opencodeinstruct",
    "codealpaca",
    "gsm8k",
    "lmsys-chat-1m",
]


class Table(BaseModel):
    """A table of the recipe: unknown keys are errors, values are never coerced silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Target(Table):
    path: str = Field(
        description="Folder (or hub name already in the local cache) of the target model, in Transformers' layout."
    )
    revision: str = Field("", description="Revision of a hub name; empty for a local folder.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the checkpoint. Off unless you trust it."
    )


class Source(Table):
    path: str = Field(
        "",
        description="File, folder or glob of records: .jsonl, .json, .txt (each plain, .gz or .zst), .parquet or "
        ".arrow; relative to the recipe file. Needed unless `preset` is set.",
    )
    preset: Preset = Field(
        "",
        description="A known data set, fetched from the hub unless `path` says where it lies: ultrachat-200k, "
        "sharegpt, open-perfectblend, magpie, openthoughts, tulu-3, opencodeinstruct, codealpaca, gsm8k, "
        "lmsys-chat-1m.",
    )
    revision: str = Field("", description="Revision of the preset's repository; empty: the local cache's, or main.")
    name: str = Field("", description="Name in counts and reports; default: the file's name.")
    format: Literal["auto", "messages", "conversations", "tokens", "pair", "text", "tree", "moss", "prompts"] = Field(
        "auto",
        description="Record form: `messages`, `conversations` (turns in any role naming), `tokens` (input_ids + "
        "loss_mask, or prompt_ids + response_ids), `pair` (instruction/output, prompt/response, question/answer...), "
        "`text` (turns in one preformatted text), `tree` (nested replies), `moss`, `prompts` (no answers yet); `auto` "
        "goes by the keys and says what it took.",
    )
    split: Literal["auto", "train", "heldout"] = Field(
        "auto",
        description="Split of its samples; `auto`: the record's own `split` key, else data.heldout_fraction decides.",
    )
    weight: float = Field(
        0.0,
        ge=0,
        description="Share of this source in the mix's tokens, relative to the other sources' weights; 0 in all: no "
        "weighting.",
    )
    budget_tokens: int = Field(0, ge=0, description="Most tokens taken from this source; 0: all.")

    @model_validator(mode="after")
    def _from_somewhere(self) -> "Source":
        if not self.path and not self.preset:
            raise ValueError("a source needs `path` or `preset`")
        return self


class Data(Table):
    sources: list[Source] = Field(
        default_factory=list,
        description="Where conversations come from, one [[data.sources]] table each. None: the store at store.url is "
        "there already (`eyas store import`), and the run begins with `verify`.",
    )
    max_tokens: int = Field(4096, ge=8, description="Longest sample, tokens.")
    too_long: Literal["truncate", "reject"] = Field("truncate", description="What happens to a longer one.")
    min_supervised_tokens: int = Field(
        1, ge=1, description="Samples with fewer supervised tokens are rejected, tokens."
    )
    mend: bool = Field(
        True,
        description="Mend conversations: drop empty turns, join user turns in a row, drop turns after the last answer. "
        "false rejects them.",
    )
    drop_pattern: str = Field(
        "", description="Regular expression: conversations with a turn in which it is found are left out."
    )
    languages: list[str] = Field(
        default_factory=list,
        description="Languages kept, as ISO 639-1 codes such as en and zh, by the conversation's text; empty: all. "
        "Needs `pip install eyas[language]`.",
    )
    near_duplicates: Fraction = Field(
        0.0,
        description="Records that share at least this part of their 5-grams of tokens with an earlier one are left "
        "out, across sources (0.8 is usual); 0: only equal ones are.",
    )
    evaluation_prompts: list[str] = Field(
        default_factory=list,
        description="Files of prompts that training must not see: records that hold one are left out, except held-out "
        "ones. Relative to the recipe file.",
    )
    heldout_fraction: Fraction = Field(
        0.02, description="Share of conversations kept out of training where no split is given."
    )
    template: str = Field(
        "", description="Jinja file with a chat template; default: the tokenizer's own. Relative to the recipe file."
    )
    template_args: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments for the chat template, such as enable_thinking."
    )
    seed: int = Field(0, description="Seed of the shuffle and of the held-out split.")
    limit: int = Field(
        0, ge=0, description="Most samples taken; 0: all. `--limit 50` sets it and names the run NAME-limit50."
    )
    workers: int = Field(0, ge=0, description="Processes that prepare works with; 0: one for each CPU core.")

    @field_validator("drop_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> "Data":
        weights = [source.weight for source in self.sources]
        if any(weights) and not all(weights):
            raise ValueError(f"weight must be set for all sources or for none, got {weights}")
        return self


class Regenerate(Table):
    servers: list[Annotated[str, Field(pattern=r"^https?://")]] = Field(
        default_factory=list,
        description="Servers that run the target and write every answer anew, such as http://127.0.0.1:8000; empty: "
        "answers are taken as the sources have them.",
    )
    kind: Literal["openai", "sglang"] = Field(
        "openai",
        description="How they are asked: `openai` is /v1/completions with token ids, as vLLM (0.10.2 or later) has it; "
        "`sglang` is /generate.",
    )
    model: str = Field("", description="Name that the servers serve the target under; empty: the first they list.")
    api_key_env: str = Field("", description="Environment variable that holds the servers' key; empty: none.")
    in_flight: int = Field(256, ge=1, description="Most requests in flight, all servers together.")
    temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of the answers; 1 is the target's own distribution, 0 is greedy."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Share of probability that tokens are sampled from.")
    top_k: int = Field(0, ge=0, description="Number of tokens that are sampled from; 0: all.")
    max_new_tokens: int = Field(2048, ge=1, description="Longest answer, tokens; data.max_tokens bounds it too.")
    seed: int = Field(0, description="Seed of sampling; each answer has its own, made of it.")
    cut_answers: Literal["keep", "drop"] = Field(
        "keep",
        description="An answer that reaches its longest length: `keep` learns from it, without end-of-turn token; "
        "`drop` leaves it out, with what follows.",
    )
    max_conversations: int = Field(0, ge=0, description="Most conversations asked of each source; 0: all.")
    timeout_s: float = Field(1800.0, gt=0, description="Longest wait for one answer, seconds; more counts as a fault.")
    patience_s: float = Field(600.0, gt=0, description="How long all servers may be down before it ends, seconds.")
    attempts: int = Field(5, ge=1, description="How often one answer is asked for on servers that work otherwise.")


class Engine(Table):
    kind: Literal["local", "sglang", "vllm"] = Field(
        "local",
        description="What runs the target: `local` is Transformers in process; `sglang` (0.5.11 to 0.5.23) and `vllm` "
        "(0.27.0 to 0.33.0) are a stock server in its own environment, started, watched and stopped by Eyas.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Number type the target runs in; `local` on a CPU without AVX-512 takes float32 for bfloat16.",
    )
    device: str = Field(
        "auto", description="`auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`... A server takes `cpu` or `cuda`."
    )
    python: str = Field(
        "", description="Interpreter of the environment that holds the server, such as /opt/sglang/bin/python."
    )
    profile: str = Field(
        "extraction",
        description="Named set of server flags and environment, or a TOML file of one; `eyas serve profiles` lists "
        "and explains them.",
    )
    args: list[str] = Field(
        default_factory=list, description='Flags for the server on top of the profile\'s, such as ["--tp-size", "8"].'
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the server on top of the profile's."
    )
    host: str = Field("127.0.0.1", description="Address the server listens on; others than loopback are reachable.")
    port: int = Field(0, ge=0, le=65535, description="Port of the server; 0: a free one.")
    patience_s: float = Field(
        600.0,
        gt=0,
        description="How long one layer of readiness may take, seconds, while the server shows no sign of work; then "
        "it is diagnosed and given up.",
    )


class Capture(Table):
    batch_tokens: int = Field(
        4096, ge=1, description="Most tokens in one forward of the local engine, padding included."
    )
    in_flight: int = Field(64, ge=1, description="Requests a server works on at once.")
    ring_bytes: int = Field(
        4 << 30, ge=1 << 20, description="Shared memory (/dev/shm) between server and capture, bytes."
    )
    spot_check: int = Field(
        2, ge=0, description="Samples of each shard whose final states are checked against the server's own logprobs."
    )
    check_middle: bool = Field(
        False,
        description="A server's self-test looks at the middle aux layer as well: all layers between the first and it "
        "are read from the checkpoint and run on the CPU.",
    )
    attempts: int = Field(5, ge=1, description="How often one sample is asked for before it is given up.")


class Store(Table):
    url: str = Field(
        "",
        description="Where hidden states go: a folder (relative to the current one) or fsspec URL; default: store/ in "
        "the run's folder.",
    )
    encoding: Literal["bf16", "fp8"] = Field(
        "bf16", description="Aux hidden states: bf16, or fp8 (e4m3, one scale per token and layer)."
    )
    final_encoding: Literal["bf16", "fp8"] = Field(
        "bf16", description="Final hidden states: bf16, or fp8 with one scale per token."
    )
    shard_bytes: int = Field(1 << 30, ge=1 << 16, description="Aimed size of one shard, bytes.")
    max_bytes: int = Field(0, ge=0, description="Budget for the store's shards, bytes; 0: none.")
    min_free_bytes: int = Field(
        2 << 30, ge=0, description="Capture stops before the disk has less than this free, bytes."
    )


class Drafter(Table):
    aux_layer_ids: list[int] = Field(
        default_factory=list,
        description="Three layers whose states feed the drafter: id i = residual stream after i decoder layers "
        "(0 = embeddings). Empty: [2, n//2, n-3].",
    )
    intermediate_size: int = Field(0, ge=0, description="MLP width; 0: the target's.")
    num_attention_heads: int = Field(0, ge=0, description="Query heads; 0: the target's.")
    num_key_value_heads: int = Field(0, ge=0, description="Key/value heads; 0: the target's.")
    fc_norm: bool = Field(
        False,
        description="Norm each aux layer's states before fc (EAGLE-3.1). SGLang reads it from 0.5.12 on.",
    )
    norm_output: bool = Field(
        False,
        description="Feed the normed state back as the next feature, not the one before the norm (EAGLE-3.1). SGLang "
        "reads it from 0.5.12 on.",
    )
    norm_before_fc: bool = Field(
        False,
        description="One norm over all aux states together before fc (speculators' form). SGLang reads it from 0.5.17.",
    )
    norm_before_residual: bool = Field(
        False,
        description="The residual starts from the normed feature (speculators' form). No SGLang release reads it, only "
        'vLLM: export.sglang_version must be "".',
    )
    sliding_window: int = Field(
        0,
        ge=0,
        description="Positions that a row attends to, its own included, at least 32; 0: all. No SGLang release reads "
        'it from a folder, only vLLM: export.sglang_version must be "".',
    )

    @field_validator("sliding_window")
    @classmethod
    def _wide_enough(cls, window: int) -> int:
        # ttt_steps and drafts are at most 16: a row sees all that it made itself, and the last known position.
        if 0 < window < 32:
            raise ValueError(f"sliding_window must be 0 or at least 32, got {window}")
        return window

    @model_validator(mode="after")
    def _three_rising_ids(self) -> "Drafter":
        ids = self.aux_layer_ids
        if ids and (len(ids) != 3 or sorted(set(ids)) != ids or ids[0] < 0):
            raise ValueError(f"aux_layer_ids must be three rising layer ids, got {ids}")
        return self


class Train(Table):
    start: str = Field(
        "",
        description="Folder of an EAGLE-3 drafter to go on from, in SGLang's (flat) or speculators' form or as a "
        "checkpoint of Eyas; empty: a new one. Relative to the recipe file.",
    )
    draft_vocab_size: int = Field(
        32000, ge=16, description="Size of the draft vocabulary, tokens; at most the target's."
    )
    epochs: float = Field(
        2.0, ge=0, description="Passes over the training samples; 0 takes `start` as it is, to measure or export it."
    )
    batch_tokens: int = Field(
        4096, ge=8, description="Token budget of one packed row; longer samples get a row of their own."
    )
    accumulation: int = Field(1, ge=1, description="Packed rows per optimizer step, over all processes.")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="With several processes (torchrun): `ddp` has the whole drafter on each GPU; `fsdp` a shard of "
        "weights, gradients and moments.",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="How long processes wait for one another before they give up, seconds."
    )
    ttt_steps: int = Field(
        7, ge=1, le=16, description="Steps of the training-time test (how many drafts in a row it trains)."
    )
    ttt_decay: float = Field(0.8, gt=0, le=1, description="Weight of step k is ttt_decay^k.")
    loss: Literal["ce", "lk-hybrid", "lk-alpha"] = Field(
        "ce",
        description="`ce`: soft cross-entropy (KL); `lk-hybrid`: KL far from the target, acceptance rate near it; "
        "`lk-alpha`: -log of the acceptance rate. The LK losses (arXiv:2602.23881) pay at temperature 1.",
    )
    lk_eta: float = Field(3.0, gt=0, description="How soon lk-hybrid turns from KL to acceptance rate.")
    freeze_lm_head: bool = Field(
        False, description="Keep lm_head as it starts: the target's rows of the draft vocabulary, or those of `start`."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="`muon`: Muon for the matrices, AdamW for lm_head and norms, by the same lr and weight decay.",
    )
    lr: float = Field(1e-4, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of matrices; norms have none.")
    warmup: Fraction = Field(
        0.03, description="Share of the steps in which lr rises to its peak; cosine to min_lr_ratio after."
    )
    min_lr_ratio: Fraction = Field(0.1, description="Learning rate at the end, as a share of lr.")
    clip: float = Field(0.5, gt=0, description="Largest norm of the gradient.")
    precision: Literal["fp32", "bf16"] = Field(
        "bf16",
        description="Number type of matrix products; masters and optimizer are fp32. A CPU without AVX-512 takes fp32.",
    )
    compile: bool = Field(
        False,
        description="Compile the LK losses on CUDA, at the cost of their first step; all else has kernels of its own.",
    )
    recompute: bool = Field(
        False,
        description="Compute the MLP's inner activations again in the backward instead of keeping them: less memory, "
        "more time, the same numbers.",
    )
    deterministic: bool = Field(
        False,
        description="Equal bits from equal runs on a GPU too, by slower kernels; on a CPU they are equal anyhow, for "
        "equal numbers of threads and processes.",
    )
    device: str = Field("auto", description="`auto` (CUDA if there is one), `cpu`, `cuda`...")
    seed: int = Field(0, description="Seed of initial weights and sample order.")
    checkpoint_every: int = Field(500, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept.")
    eval_every: int = Field(200, ge=1, description="Steps between measurements on held-out samples.")
    eval_samples: int = Field(64, ge=1, description="Held-out samples measured while training.")
    patience: int = Field(
        0,
        ge=0,
        description="Measurements without a better held-out acceptance length until training stops; the best "
        "checkpoint is then the one that is evaluated and exported. 0: all epochs, and the last one.",
    )
    tensorboard: bool = Field(
        False,
        description="Write logs/tensorboard too, for `tensorboard --logdir`. Needs `pip install eyas[tensorboard]`.",
    )

    @field_validator("epochs")
    @classmethod
    def _something_to_take(cls, epochs: float, info: ValidationInfo) -> float:
        if not epochs and not info.data.get("start"):
            raise ValueError("0 needs `train.start`, the drafter to take as it is")
        return epochs


class Evaluate(Table):
    drafts: int = Field(3, ge=1, le=16, description="Tokens drafted in a row (chain) before each verification.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of reference decoding; 0 is greedy.")
    decode_prompts: int = Field(
        16, ge=0, description="Held-out prompts decoded in process; 0 skips reference decoding."
    )
    decode_tokens: int = Field(48, ge=1, description="Tokens decoded for each.")
    seed: int = Field(0, description="Seed of sampling at temperature > 0.")


class Export(Table):
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Number type of the exported weights."
    )
    form: Literal["flat", "speculators"] = Field(
        "flat",
        description="`flat`: one folder for SGLang and vLLM; `speculators`: its form, for `vllm serve FOLDER`.",
    )
    sglang_version: str = Field(
        "0.5.23",
        description="SGLang release whose layer-id rule the flat folder follows (0.5.11 to 0.5.23); empty: for vLLM "
        "alone.",
    )
    embedding: bool = Field(
        False,
        description="Put the target's embedding into the flat folder: vLLM needs it where the target is cut into "
        "pipeline stages, and takes the target's own elsewhere; SGLang never reads it. The speculators form has it.",
    )


class Serving(Table):
    kind: Literal["", "sglang", "vllm"] = Field(
        "",
        description="Engine that the drafter is measured in, tuned for and served by; empty: none, and `eyas run` ends "
        "with export.",
    )
    python: str = Field(
        "", description="Interpreter of that engine's environment; empty: engine.python, with engine.env."
    )
    drafter: str = Field(
        "", description="Folder of the drafter that is served; empty: the run's export/. Relative to the recipe file."
    )
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        "", description="Number type the engine serves in; empty: engine.dtype."
    )
    profile: str = Field(
        "",
        description="Named set of server flags and environment, or a TOML file of one; empty: what `eyas tune` found "
        "for this run, else `serving`.",
    )
    args: list[str] = Field(
        default_factory=list,
        description="Flags for the server on top of the profile's; of engine.args tensor parallel alone is taken over.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for the server on top of the profile's."
    )
    host: str = Field("127.0.0.1", description="Address the server listens on.")
    port: int = Field(0, ge=0, le=65535, description="Port of the server; 0: a free one.")
    drafts: int = Field(3, ge=1, le=16, description="Tokens drafted in a row before each verification.")
    top_k: int = Field(
        1, ge=1, le=16, description="Drafts tried for each token: 1 is a chain, more make a tree (SGLang only)."
    )
    draft_tokens: int = Field(
        0, ge=0, description="Tokens verified at once, the newest one included; 0: drafts + 1. For trees."
    )
    prompts: list[str] = Field(
        default_factory=list,
        description='Files of prompts, one set each: lines of {"id", "prompt"}, {"turns": [...]} or {"messages": '
        "[...]}; empty: the run's held-out prompts. Relative to the recipe file.",
    )
    max_prompts: int = Field(0, ge=0, description="Most prompts taken from each set; 0: all.")
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(
        [1], min_length=1, description="Numbers of streams at once that are measured, such as [1, 16]."
    )
    prompts_per_stream: int = Field(
        0, ge=0, description="Prompts that each stream answers of a set, so that one stream takes fewer; 0: all."
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy, and outputs are compared.")
    max_new_tokens: int = Field(256, ge=1, description="Longest answer, tokens.")
    seed: int = Field(0, description="Seed of sampling; each answer has its own, made of it.")
    repeats: int = Field(3, ge=1, description="How often each set is measured.")
    servers: int = Field(
        1, ge=1, description="Servers kept at once, so that repeats interleave; as many as memory has room for."
    )
    parity_prompts: int = Field(
        32, ge=0, description="Prompts on which engine, replay and reference decoding are compared; 0: none."
    )
    max_gap: float = Field(
        0.03, gt=0, description="Largest relative difference of their acceptance lengths that passes."
    )
