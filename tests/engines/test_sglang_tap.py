"""The tap in a real SGLang 0.5.23 on CPU, float32: rows through the ring against Transformers.

Prompts are cut into chunks of 64 tokens. Run by `make test-engines`; servers are started one after the other.
"""

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tap_server import Reference, TapServer, compare
from transformers import (
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [150, 64, 65, 1, 130, 9, 201]
TINY = {
    "vocab_size": 512,
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
TINY |= {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TINY_LAYERS = [2, 4, 6]

# SGLang 0.5.23 runs DeepSeek's first chunk as plain attention on a CPU, but its `torch_native` backend reads keys and
# values from the cache, which holds the latent ones (torch_native_backend.py:318, attention_backend_handler.py:233):
# the states are wrong, or the shapes don't fit. The latent form that it takes for later chunks is right; this takes it
# always.
MLA_PLUGIN = {
    "cpu_mla/__init__.py": """
def register():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
""",
    "cpu_mla-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpu_mla\nVersion: 0\n",
    "cpu_mla-0.dist-info/entry_points.txt": "[sglang.srt.plugins]\ncpu_mla = cpu_mla:register\n",
}


# A core for each rank; and no NCCL, which SGLang opens on a CPU too where its library is found, and dies of.
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nowhere"}


@pytest.fixture(scope="module")
def python() -> Path:
    made = subprocess.run(
        ["bash", ROOT / "tests/engines/sglang_venv.sh"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(made.stdout.strip()) / "bin/python"


@pytest.fixture(scope="class")
def start(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TapServer]]:
    """Starts a server, which is stopped after the class's tests."""
    servers: list[TapServer] = []

    def begin(name: str, *arguments, **named) -> TapServer:
        servers.append(TapServer(python, tmp_path_factory.mktemp(name), *arguments, **named))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


def make_prompts(vocab: int, lengths: list[int], seed: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"eyas-{seed}-{number}": torch.randint(3, vocab, (length,), generator=generator).tolist()
        for number, length in enumerate(lengths)
    }


def make_tiny(kind: type[PreTrainedModel], folder: Path, **config) -> Path:
    """A folder with a random model of 8 layers whose layers differ clearly."""
    torch.manual_seed(0)
    model = kind(kind.config_class(**(TINY | config))).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return folder


class TestPlugin:
    """SmolLM2, its layers set by the tap, decode steps mixed into chunks."""

    LAYERS = [2, 15, 27]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, start, demo_target: Path) -> TapServer:
        server = start("smollm2", demo_target, cls.LAYERS, ["--enable-mixed-chunk"])
        server.wait()
        return server

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, server: TapServer) -> dict[str, list[int]]:
        """Prompts that were sent all at once among requests of others, their rows collected."""
        prompts = make_prompts(49152, LENGTHS, 1)
        others = {f"other-{number}": ids for number, ids in enumerate(prompts.values())}
        server.open()
        health = threading.Thread(target=httpx.get, args=(f"{server.url}/health_generate",), kwargs={"timeout": 100})
        health.start()
        server.generate_all(prompts | others)
        health.join()
        server.collect()
        return prompts

    def test_a_start_is_told(self, server: TapServer) -> None:
        assert {event["role"] for event in server.events("plugin")} == {"scheduler", "other"}
        (weights,), (layers,), (ring,) = (server.events(name) for name in ("weights", "layers", "ring"))
        assert weights["model"] == "LlamaForCausalLM" and ring["pinned"] is False
        assert (layers["read"], layers["passed"], layers["rank"]) == (self.LAYERS, [1, 14, 26], 0)
        assert server.events("refused") == []

    def test_warm_up_and_health_leave_no_rows(self, server: TapServer) -> None:
        assert server.events("fired") == []

    def test_states_equal_transformers(self, server: TapServer, prompts, demo_target: Path) -> None:
        compare(server, Reference(demo_target), prompts, self.LAYERS)
        assert len(server.events("fired")) == 1

    def test_requests_of_others_leave_no_rows(self, server: TapServer, prompts) -> None:
        assert {rid for rid, _ in server.rows} == set(prompts)
        assert server.ring.counters().rows == sum(LENGTHS) and server.ring.counters().dropped_rows == 0

    def test_generated_tokens_leave_no_rows(self, server: TapServer, demo_target: Path) -> None:
        """Requests that decode while others prefill: their tokens are tails of mixed batches."""
        prompts = make_prompts(49152, [30, 140, 100, 70, 190], 2)
        slow = threading.Thread(target=server.generate_all, args=(dict(list(prompts.items())[:2]), 40))
        slow.start()
        time.sleep(1.0)
        server.generate_all(dict(list(prompts.items())[2:]), 4)
        slow.join()
        assert re.search(r"Prefill batch.*#running-req: [1-9]", server.log.read_text())  # with decode steps in it
        server.collect()
        compare(server, Reference(demo_target), prompts, self.LAYERS)

    def test_a_reader_that_goes_and_comes(self, server: TapServer, demo_target: Path) -> None:
        """The server answers on without one; rows come again with the next."""
        dropped = server.ring.counters().dropped_rows
        server.ring.close()
        prompts = make_prompts(49152, [90], 3)
        server.generate_all(prompts)
        assert [event["why"] for event in server.events("dropped")] == ["nobody reads the ring"]
        server.open()
        assert server.ring.counters().dropped_rows == dropped + 90
        again = {rid + "-again": ids for rid, ids in prompts.items()}
        server.generate_all(again)
        server.collect()
        assert [event["dropped_rows"] for event in server.events("flowing")] == [dropped + 90]
        compare(server, Reference(demo_target), again, self.LAYERS)


class TestOfficialFlag:
    """A tiny Qwen3, its layers set by SGLang's own flag."""

    def test_states_equal_transformers(self, start, tmp_path_factory: pytest.TempPathFactory) -> None:
        target = make_tiny(
            Qwen3ForCausalLM,
            tmp_path_factory.mktemp("qwen3"),
            num_key_value_heads=2,
            intermediate_size=256,
            head_dim=64,
        )
        server = start("official", target, TINY_LAYERS, ["--skip-tokenizer-init"], official=[1, 3, 5])
        server.wait()
        (layers,) = server.events("layers")
        assert (layers["read"], layers["setter"]) == (TINY_LAYERS, "--enable-return-aux-hidden-states")
        server.open()
        prompts = make_prompts(512, LENGTHS, 4)
        server.generate_all(prompts | {f"other-{rid}": ids for rid, ids in prompts.items()})
        server.collect()
        compare(server, Reference(target), prompts, TINY_LAYERS)
        assert {rid for rid, _ in server.rows} == set(prompts)


class TestOffByOne:
    """SGLang's flag given Eyas's ids instead of its own."""

    def test_the_start_fails_with_both(self, start, tmp_path_factory: pytest.TempPathFactory) -> None:
        target = make_tiny(
            Qwen3ForCausalLM,
            tmp_path_factory.mktemp("qwen3"),
            num_key_value_heads=2,
            intermediate_size=256,
            head_dim=64,
        )
        server = start("off-by-one", target, TINY_LAYERS, ["--skip-tokenizer-init"], official=TINY_LAYERS)
        with pytest.raises(AssertionError, match="exit code"):
            server.wait()
        (refused,) = server.events("refused")
        assert "[3, 5, 7]" in refused["seen"] and refused["expected"] == "the streams that enter layers [2, 4, 6]"
        assert server.events("fired") == []


class TestTensorParallel:
    """A tiny Qwen3-MoE over two ranks, a core each: one of them sends, every row once."""

    OFFICIAL: list[int] | None = None

    def test_states_equal_transformers(self, start, tmp_path_factory: pytest.TempPathFactory) -> None:
        target = make_tiny(
            Qwen3MoeForCausalLM,
            tmp_path_factory.mktemp("moe"),
            num_key_value_heads=2,
            intermediate_size=256,
            head_dim=64,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
        flags = ["--skip-tokenizer-init", "--tp-size", "2"]
        server = start("tensor-parallel", target, TINY_LAYERS, flags, env=TWO_CORES, official=self.OFFICIAL)
        server.wait()
        assert sorted(event["rank"] for event in server.events("weights")) == [0, 1]
        assert sorted(event["rank"] for event in server.events("layers")) == ([0] if self.OFFICIAL else [0, 1])
        assert [event["rank"] for event in server.events("ring")] == [0]
        server.open()
        prompts = make_prompts(512, LENGTHS, 5)
        server.generate_all(prompts)
        server.collect()
        compare(server, Reference(target), prompts, TINY_LAYERS)


class TestTensorParallelOfficial(TestTensorParallel):
    """The same under SGLang's own flag: its layers are read back at the first forward pass, by the rank that sends."""

    OFFICIAL = [1, 3, 5]


class TestDeepseek:
    """A tiny DeepSeek-V3: latent attention, experts in groups, YaRN."""

    def test_states_equal_transformers(self, start, tmp_path_factory: pytest.TempPathFactory) -> None:
        yarn = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        yarn |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        target = make_tiny(
            DeepseekV3ForCausalLM,
            tmp_path_factory.mktemp("deepseek"),
            num_key_value_heads=4,
            intermediate_size=256,
            moe_intermediate_size=64,
            n_routed_experts=16,
            n_shared_experts=1,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=2,
            q_lora_rank=64,
            kv_lora_rank=96,
            qk_rope_head_dim=32,
            qk_nope_head_dim=64,
            v_head_dim=64,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            rope_scaling=yarn,
            num_nextn_predict_layers=0,
        )
        # What DeepSeek's own config.json has, and Transformers doesn't write.
        path = target / "config.json"
        more = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
        server = start("deepseek-server", target, TINY_LAYERS, ["--skip-tokenizer-init"], plugins=MLA_PLUGIN)
        server.wait()
        (layers,) = server.events("layers")
        assert (layers["setter"], layers["passed"], layers["read"]) == (
            "set_dflash_layers_to_capture",
            [1, 3, 5],
            TINY_LAYERS,
        )
        server.open()
        prompts = make_prompts(512, LENGTHS, 6)
        server.generate_all(prompts)
        server.collect()
        compare(server, Reference(target), prompts, TINY_LAYERS)
