"""Strict loading: rules, dtypes and messages that name tensor, expected and found."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mimo.checkpoint.index import CheckpointIndex
from mimo.checkpoint.loader import load
from mimo.checkpoint.rules import Cast, Rename, Rule, SplitFusedQkv, qkv_rows
from mimo.errors import CheckpointError

HIDDEN = 10


class Projections(nn.Module):
    """The projections of one attention layer, under their published names."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(HIDDEN, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(HIDDEN, num_kv_heads * v_head_dim, bias=False)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, bias=False)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.arange(3, device="cpu"), persistent=False)


def save(directory: Path, tensors: dict[str, Tensor]) -> CheckpointIndex:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "m.safetensors")
    return CheckpointIndex.open(directory)


def small_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "tower.norm.weight": torch.randn(3).to(torch.bfloat16),
        "tower.linear.weight": torch.randn(2, 3).to(torch.bfloat16),
        "tower.linear.bias": torch.randn(2),
        "tower.count": torch.tensor([3, 4]),
        "other.weight": torch.zeros(1),
    }


def meta_small() -> Small:
    with torch.device("meta"):
        return Small()


def test_a_meta_module_gets_stored_values_and_dtypes(tmp_path: Path) -> None:
    tensors, module = small_tensors(), meta_small()
    load(module, save(tmp_path, tensors), prefix="tower.")
    state = module.state_dict()
    assert set(state) == {"norm.weight", "linear.weight", "linear.bias", "count"}
    for name, value in state.items():
        stored = tensors[f"tower.{name}"]
        assert torch.equal(value, stored) and value.dtype is stored.dtype
    assert isinstance(module.linear.weight, nn.Parameter) and module.linear.weight.requires_grad
    assert module.table.tolist() == [0, 1, 2]


def test_loaded_weights_outlive_the_file(tmp_path: Path) -> None:
    module = meta_small()
    load(module, save(tmp_path, small_tensors()), prefix="tower.")
    before = module.linear.weight.clone()
    file = tmp_path / "m.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(module.linear.weight, before)


def test_floating_point_tensors_are_cast_except_where_a_rule_says_otherwise(tmp_path: Path) -> None:
    module = meta_small()
    rules = [Cast(r"^norm\.", None), Cast(r"bias$", "float64")]
    load(module, save(tmp_path, small_tensors()), rules, prefix="tower.", dtype=torch.float32)
    assert module.linear.weight.dtype is torch.float32
    assert module.norm.weight.dtype is torch.bfloat16
    assert module.linear.bias.dtype is torch.float64
    assert module.count.dtype is torch.int64


def test_renames_apply_in_order(tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["tower.fc.weight"] = tensors.pop("tower.linear.weight")
    tensors["tower.fc.bias"] = tensors.pop("tower.linear.bias")
    module = meta_small()
    rules = [Rename(r"^fc\.", "dense."), Rename(r"^dense\.", "linear.")]
    load(module, save(tmp_path, tensors), rules, prefix="tower.")
    assert torch.equal(module.linear.bias, tensors["tower.fc.bias"])


def refusal(directory: Path, tensors: dict[str, Tensor], **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(meta_small(), save(directory, tensors), prefix="tower.", **options)
    return str(caught.value)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    tensors = small_tensors()
    del tensors["tower.linear.weight"]
    assert refusal(tmp_path, tensors) == "expected but not found: tower.linear.weight [2, 3]"


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    tensors = small_tensors() | {"tower.linear.scale": torch.zeros(1)}
    assert refusal(tmp_path, tensors) == "found but not expected: tower.linear.scale [1]"


def test_ignored_tensors_are_not_unexpected(tmp_path: Path) -> None:
    tensors = small_tensors() | {"tower.linear.scale": torch.zeros(1)}
    load(meta_small(), save(tmp_path, tensors), prefix="tower.", ignore=[r"\.scale$"])


def test_a_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = small_tensors() | {"tower.norm.weight": torch.zeros(4)}
    message = refusal(tmp_path, tensors)
    assert message == "tensor tower.norm.weight: expected shape [3] for norm.weight, found [4]"


def test_a_quantised_dtype_is_refused(tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["tower.linear.weight"] = torch.zeros(2, 3, dtype=torch.float8_e4m3fn)
    message = refusal(tmp_path, tensors)
    assert message.startswith("tensor tower.linear.weight: expected one of F64")
    assert message.endswith("found dtype F8_E4M3")


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    tensors = small_tensors() | {"tower.fc.weight": torch.zeros(2, 3)}
    message = refusal(tmp_path, tensors, rules=[Rename(r"^fc\.", "linear.")])
    assert message == "tensors tower.fc.weight and tower.linear.weight both become linear.weight"


def test_a_buffer_left_on_the_meta_device_is_a_bug(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Small()
        module.register_buffer("lost", torch.zeros(1), persistent=False)
    with pytest.raises(RuntimeError, match="buffer lost"):
        load(module, save(tmp_path, small_tensors()), prefix="tower.")


GEOMETRIES = [  # query heads, kv heads, head dim, value head dim, chunks
    (4, 2, 6, 4, 2),
    (8, 4, 6, 4, 2),  # a sliding layer: more kv heads than chunks
    (4, 4, 3, 5, 4),
    (4, 1, 24, 16, 1),
]


def split_tensors(geometry: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    num_heads, num_kv_heads, head_dim, v_head_dim, _ = geometry
    torch.manual_seed(1)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_head_dim)
    return {
        f"{letter}_proj.weight": torch.randn(size, HIDDEN).to(dtype)
        for letter, size in zip("qkv", sizes, strict=True)
    }


def fuse(tensors: dict[str, Tensor], geometry: tuple[int, ...]) -> dict[str, Tensor]:
    """Head by head, as the published layout is described: chunk c holds heads [c*n, (c+1)*n)."""
    num_heads, num_kv_heads, head_dim, v_head_dim, chunks = geometry
    heads = {
        "q": tensors["q_proj.weight"].split(head_dim),
        "k": tensors["k_proj.weight"].split(head_dim),
        "v": tensors["v_proj.weight"].split(v_head_dim),
    }
    rows: list[Tensor] = []
    for chunk in range(chunks):
        for letter, total in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            count = total // chunks
            rows.extend(heads[letter][chunk * count : (chunk + 1) * count])
    return {"qkv_proj.weight": torch.cat(rows)}


def load_projections(
    directory: Path, tensors: dict[str, Tensor], geometry: tuple[int, ...], rules: list[Rule]
) -> Projections:
    with torch.device("meta"):
        module = Projections(*geometry[:4])
    index = save(directory, {f"attn.{name}": tensor for name, tensor in tensors.items()})
    load(module, index, rules, prefix="attn.")
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_split_interleaved_and_plain_give_the_same_bits(
    tmp_path: Path, geometry: tuple[int, ...], dtype: torch.dtype
) -> None:
    split = split_tensors(geometry, dtype)
    plain = {"qkv_proj.weight": torch.cat(list(split.values()))}
    interleaved = fuse(split, geometry)
    modules = [load_projections(tmp_path / "split", split, geometry, [])]
    for rows, tensors in (("plain", plain), ("interleaved", interleaved)):
        rule = SplitFusedQkv(r"^qkv_proj\.weight$", *geometry, rows)
        modules.append(load_projections(tmp_path / rows, tensors, geometry, [rule]))
    x = torch.randn(3, HIDDEN).to(dtype)
    for name, stored in split.items():
        layer = name.removesuffix(".weight")
        for module in modules:
            weight = module.get_parameter(name)
            assert torch.equal(weight, stored) and weight.dtype is dtype
            assert torch.equal(module.get_submodule(layer)(x), modules[0].get_submodule(layer)(x))


def test_chunks_must_divide_the_heads(tmp_path: Path) -> None:
    geometry = (4, 2, 6, 4, 2)
    rule = SplitFusedQkv(r"qkv_proj", 4, 2, 6, 4, 4, "interleaved")
    with pytest.raises(CheckpointError, match="qkv_proj.weight: 4 chunks do not divide 4 query"):
        fused = fuse(split_tensors(geometry, torch.float32), geometry)
        load_projections(tmp_path, fused, geometry, [rule])


def test_fused_rows_must_match_the_geometry(tmp_path: Path) -> None:
    geometry = (4, 2, 6, 4, 2)
    rule = SplitFusedQkv(r"qkv_proj", 4, 2, 6, 6, 2, "interleaved")
    with pytest.raises(CheckpointError, match="qkv_proj.weight: expected 48 rows, found 44"):
        fused = fuse(split_tensors(geometry, torch.float32), geometry)
        load_projections(tmp_path, fused, geometry, [rule])


@pytest.mark.parametrize("layout", [None, "split"])
def test_split_layouts_have_no_row_order(layout: str | None) -> None:
    assert qkv_rows({"attention_projection_layout": layout}) is None


def test_row_order_comes_from_the_flag_then_the_profile_then_the_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"attention_projection_layout": "fused_qkv"}
    profile = config | {"numeric_profile": {"qkv_rows": "plain"}}
    with caplog.at_level(logging.INFO):
        assert qkv_rows(profile, override="interleaved") == "interleaved"
        assert qkv_rows(profile) == "plain"
        assert not caplog.records
        assert qkv_rows(config) == "interleaved"
    assert "assumed" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        {"attention_projection_layout": "fused"},
        {
            "attention_projection_layout": "fused_qkv",
            "numeric_profile": {"qkv_rows": "by head"},
        },
    ],
)
def test_an_unknown_layout_or_row_order_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="expected .* or .*, found"):
        qkv_rows(config)
