"""Encodings: exact where they can be, bounded where not, and every bad row named."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.store.account import relative_error
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter
from eyas.tap.encode import FINE, INF, NAN, ZERO, decode, encode, row_faults

torch.set_num_threads(1)
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = ~torch.isnan(CODES.float())


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30, 3e30, 1e-40])
def test_decode_equals_torchs_conversion_for_every_code(scale: float) -> None:
    codes = CODES[FINITE].view(1, -1)
    scales = torch.tensor([scale])
    assert torch.equal(decode(codes, scales), (codes.float() * scales.unsqueeze(-1)).bfloat16())


def test_decode_does_not_depend_on_how_denormals_are_treated() -> None:
    codes, scales = CODES[FINITE].view(1, -1), torch.tensor([0.5])
    plain = decode(codes, scales)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(decode(codes, scales), plain)
    finally:
        torch.set_flush_denormal(False)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), exponent=st.integers(-30, 30), shape=st.sampled_from([(5, 3, 7), (33, 16), (1, 3, 1)])
)
def test_fp8_keeps_every_value_to_a_sixteenth(seed: int, exponent: int, shape: tuple[int, ...]) -> None:
    states = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    made = encode(states, "fp8")
    assert made.scales is not None and made.scales.shape == shape[:-1]
    assert (made.faults == FINE).all()
    smallest = made.scales.unsqueeze(-1) * 2.0**-10  # half a step of e4m3's subnormals
    got = decode(made.values, made.scales).float()
    assert ((got - states).abs() <= states.abs() * (1 / 16 + 1 / 256) + smallest).all()
    torch.testing.assert_close(got.abs().amax(-1), states.abs().amax(-1), rtol=1 / 128, atol=0)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bad_rows_are_found_and_only_they(data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from(["bf16", "fp8"]))
    shape = data.draw(st.sampled_from([(40, 3, 8), (50, 8), (2, 3, 5000)]))
    states = torch.randn(shape)
    expected = torch.full(shape[:-1], FINE, dtype=torch.int8)
    for _ in range(data.draw(st.integers(0, 4))):
        row = tuple(data.draw(st.integers(0, size - 1)) for size in shape[:-1])
        kind, value = data.draw(
            st.sampled_from([(NAN, float("nan")), (INF, float("inf")), (INF, -float("inf")), (ZERO, 0.0)])
        )
        if kind == ZERO:
            states[row] = 0.0
        else:
            states[row] = 1.0
            states[row][data.draw(st.integers(0, shape[-1] - 1))] = value
        expected[row] = kind
    made = encode(states, encoding)
    assert torch.equal(made.faults, expected)
    if encoding == "bf16":
        assert torch.equal(row_faults(made.values), expected)
        assert torch.equal(made.values[expected == FINE], states.bfloat16()[expected == FINE])


def test_the_error_is_that_of_the_layers() -> None:
    states = torch.randn(64, 3, 256) * torch.tensor([1.0, 100.0, 0.01]).view(1, 3, 1)
    made = encode(states, "fp8")
    rows = slice(None, None, 16)
    off = (decode(made.values, made.scales).float() - states)[rows].norm(dim=(0, 2)) / states[rows].norm(dim=(0, 2))
    sums = made.error.double().sum(0)
    np.testing.assert_allclose((sums[:, 0] / sums[:, 1]).sqrt(), off, rtol=1e-5)
    assert (off > 0.015).all() and (off < 0.035).all()
    assert encode(states, "bf16").error is None
    every = encode(states, "fp8", every=1).error
    assert torch.equal(every[rows], made.error[rows]) and (every > 0).all() and not made.error[1:16].any()


def test_the_store_reports_it(tmp_path: Path) -> None:
    from helpers_store import make_manifest, make_samples, write_store

    write_store(str(tmp_path / "store"), make_samples(30, longest=60), make_manifest("fp8", "fp8"))
    errors = relative_error(StoreReader(str(tmp_path / "store")))
    assert [len(errors["aux"]), len(errors["final"])] == [3, 1]
    assert all(0.01 < value < 0.04 for value in errors["aux"] + errors["final"])


class OfGpu(torch.Tensor):
    """Stands in for a tensor on a GPU where there is none: numpy takes it only after `cpu`."""

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_states_of_a_gpu_are_measured_too(tmp_path: Path) -> None:
    """The whole way on a real one: tests/gpu/test_store_gpu.py."""
    from helpers_store import make_manifest, make_samples, states

    (sample,) = make_samples(1, longest=60)
    with StoreWriter.open(str(tmp_path / "store"), make_manifest("fp8", "fp8"), [sample.entry]) as writer:
        made = [encode(part, "fp8") for part in states(sample)]
        writer.write_encoded(sample, 0, *(part._replace(error=part.error.as_subclass(OfGpu)) for part in made))
    assert all(0.005 < value < 0.05 for value in relative_error(StoreReader(str(tmp_path / "store")))["aux"])


def test_it_needs_torch_alone() -> None:
    """The engine's environment has no eyas: the file is run there by its path."""
    path = Path(__file__).parent.parent / "src/eyas/tap/encode.py"
    program = f"""
import sys, importlib.util
spec = importlib.util.spec_from_file_location("encode", {str(path)!r})
module = sys.modules["encode"] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
known = {{"eyas", "numpy.typing", "pydantic", "pyarrow", "xxhash", "safetensors"}}
print(sorted(known & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
