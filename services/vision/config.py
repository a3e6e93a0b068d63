"""The vision tower's configuration: ``vision_config`` of a checkpoint, typed and checked once."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from mimo.errors import CheckpointError

NORM_EPS = 1e-6  # everywhere in the tower; the text model's ``layernorm_epsilon`` does not apply
ROPE_THETA = 10_000.0

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


SwitchT = TypeVar("SwitchT", bound=StrEnum)


class SinkMode(StrEnum):
    """What a banded block's per-head ``sinks`` do; public implementations disagree."""

    KEY0 = "key0"  # added to the logit of the first key of the query's segment
    COLUMN = "column"  # one more logit in the softmax denominator, without a value


class MergerNorm(StrEnum):
    """Kind of the merger's first norm ``ln_q``; both have a weight of the same shape."""

    LAYER = "layer"
    RMS = "rms"


class PixelStats(StrEnum):
    """Where the mean and standard deviation of pixels (on a 0..1 scale) come from."""

    CLIP = "clip"
    IMAGENET = "imagenet"
    PREPROCESSOR = "preprocessor"  # image_mean and image_std of preprocessor_config.json


@dataclass(frozen=True, slots=True)
class VisionTowerConfig:
    """Shape and numeric switches of a tower, by the checkpoint's names where it has one."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int  # not hidden_size / num_heads: the published tower has 64, not 40
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    use_sink: bool
    visual_token_window_size: int  # keys visible on either side of a query, in patches
    vit_window_attn_types: tuple[int, ...]
    fullatt_block_indexes: tuple[int, ...]
    vision_sinks: SinkMode
    vision_merger_norm: MergerNorm
    vision_pixel_stats: PixelStats
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]

    @classmethod
    def from_checkpoint(
        cls,
        config: Mapping[str, Any],
        *,
        preprocessor: Mapping[str, Any] | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> "VisionTowerConfig":
        """Read a checkpoint's ``config.json`` and, if it has one, ``preprocessor_config.json``.

        Numeric switches come from ``overrides``, else the config's ``numeric_profile``, else a
        default. Raises CheckpointError naming the field that is unknown or contradicts another.
        """
        if not config.get("vision_config"):
            raise CheckpointError("config.json has no vision_config: this model takes no pictures")
        vision = _Fields(config["vision_config"])
        switches = {**(config.get("numeric_profile") or {}), **(overrides or {})}
        if switches.get("vision_resize", "bilinear") != "bilinear":
            raise CheckpointError(
                f"numeric_profile.vision_resize {switches['vision_resize']!r}: only bilinear exists"
            )
        stats, mean, std = _pixel_stats(switches, preprocessor or {})
        depth = vision.integer("depth", 28)
        num_heads = vision.integer("num_heads", 32)
        head_dim = vision.integer("qk_channels", 64)
        tower = cls(
            depth=depth,
            hidden_size=vision.integer("hidden_size", 1280),
            intermediate_size=vision.integer("intermediate_size", 4608),
            num_heads=num_heads,
            num_key_value_heads=vision.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            in_channels=vision.integer("in_chans", vision.integer("in_channels", 3)),
            patch_size=vision.integer("patch_size", 16),
            temporal_patch_size=vision.integer("temporal_patch_size", 2),
            spatial_merge_size=vision.integer("spatial_merge_size", 2),
            out_hidden_size=vision.integer("out_hidden_size", 2048),
            use_sink=bool(vision.get("use_sink", False)),
            visual_token_window_size=vision.integer("visual_token_window_size", 64),
            vit_window_attn_types=tuple(vision.get("vit_window_attn_types", (-1,) * depth)),
            fullatt_block_indexes=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            vision_sinks=_switch(switches, "vision_sinks", SinkMode.KEY0),
            vision_merger_norm=_switch(switches, "vision_merger_norm", MergerNorm.LAYER),
            vision_pixel_stats=stats,
            pixel_mean=mean,
            pixel_std=std,
        )
        tower._check(vision, config)
        return tower

    @property
    def patch_dim(self) -> int:
        """Values in one patch: channels x frames x rows x columns, flattened in that order."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_factor(self) -> int:
        """Patches in a unit: a square of neighbours that becomes one token."""
        return self.spatial_merge_size**2

    @property
    def numeric_profile(self) -> dict[str, str]:
        """The switches in force, by the names they have on disk."""
        return {
            "vision_sinks": self.vision_sinks,
            "vision_merger_norm": self.vision_merger_norm,
            "vision_pixel_stats": self.vision_pixel_stats,
            "vision_resize": "bilinear",
        }

    def is_full(self, block: int) -> bool:
        """Whether a block attends to the whole segment, without a sink."""
        return block in self.fullatt_block_indexes

    def is_column_order(self, block: int) -> bool:
        """Whether a block sees the units of a frame column by column."""
        return self.vit_window_attn_types[block] == 1

    def has_sink(self, block: int) -> bool:
        return self.use_sink and not self.is_full(block)

    def _check(self, vision: "_Fields", config: Mapping[str, Any]) -> None:
        types = self.vit_window_attn_types
        if len(types) != self.depth:
            _refuse("vit_window_attn_types", f"has {len(types)} entries for depth {self.depth}")
        if not set(types) <= {-1, 0, 1}:
            _refuse("vit_window_attn_types", "may hold only -1 (full), 0 (row) and 1 (column)")
        full = [block for block, kind in enumerate(types) if kind == -1]
        if sorted(self.fullatt_block_indexes) != full:
            _refuse(
                "fullatt_block_indexes",
                f"is {list(self.fullatt_block_indexes)}, but vit_window_attn_types is -1 at {full}",
            )
        if self.num_heads % self.num_key_value_heads:
            _refuse(
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide num_heads {self.num_heads}",
            )
        if self.head_dim % 4:
            _refuse("qk_channels", f"{self.head_dim} is not a multiple of 4, as 2-D rotary needs")
        vision.agree("kv_channels", self.head_dim, default=64)
        vision.agree("spatial_patch_size", self.patch_size)
        vision.agree("hidden_act", "silu")
        if len(self.pixel_mean) != self.in_channels or len(self.pixel_std) != self.in_channels:
            _refuse("in_channels", f"is {self.in_channels}, but pixel statistics differ in length")
        if config.get("hidden_size", self.out_hidden_size) != self.out_hidden_size:
            _refuse(
                "out_hidden_size",
                f"{self.out_hidden_size} is not the language model's {config['hidden_size']}",
            )
        processor = _Fields(config.get("processor_config") or {}, "processor_config")
        processor.agree("patch_size", self.patch_size)
        processor.agree("merge_size", self.spatial_merge_size)
        processor.agree("temporal_patch_size", self.temporal_patch_size)


class _Fields:
    """A JSON object in which an absent key and null mean the same."""

    def __init__(self, values: Mapping[str, Any], name: str = "vision_config") -> None:
        self._values, self._name = values, name

    def get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self._name}.{key} is {value!r}, not a positive integer")
        return value

    def agree(self, key: str, expected: object, default: object = None) -> None:
        value = self.get(key, expected if default is None else default)
        if value != expected:
            raise CheckpointError(f"{self._name}.{key} is {value!r}, expected {expected!r}")


def _refuse(field: str, problem: str) -> None:
    raise CheckpointError(f"vision_config.{field} {problem}")


def _switch(switches: Mapping[str, Any], name: str, default: SwitchT) -> SwitchT:
    value = switches.get(name, default)
    kind = type(default)
    if value not in list(kind):
        raise CheckpointError(f"numeric_profile.{name} {value!r} is not one of {', '.join(kind)}")
    return kind(value)


def _pixel_stats(
    switches: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> tuple[PixelStats, tuple[float, ...], tuple[float, ...]]:
    published = "image_mean" in preprocessor and "image_std" in preprocessor
    default = PixelStats.PREPROCESSOR if published else PixelStats.CLIP
    stats = _switch(switches, "vision_pixel_stats", default)
    if stats is PixelStats.CLIP:
        return stats, CLIP_MEAN, CLIP_STD
    if stats is PixelStats.IMAGENET:
        return stats, IMAGENET_MEAN, IMAGENET_STD
    if not published:
        raise CheckpointError("preprocessor_config.json has no image_mean and image_std")
    mean, std = tuple(preprocessor["image_mean"]), tuple(preprocessor["image_std"])
    return stats, mean, std
