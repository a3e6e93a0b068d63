"""What the gateway decided about one image or clip before its pixels were sent."""

from dataclasses import dataclass

from mimo.errors import InvalidRequest, Reason
from services.vision.config import VisionTowerConfig


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """Sizes of one item. A still image is a clip of one frame.

    ``grid_thw`` counts patches after the frames are padded to whole temporal patches by repeating
    the last one. ``resized`` says that the frames already have the target size, as float32.
    """

    num_frames: int
    source_height: int
    source_width: int
    target_height: int
    target_width: int
    grid_thw: tuple[int, int, int]
    resized: bool = False

    @property
    def num_patches(self) -> int:
        t, h, w = self.grid_thw
        return t * h * w

    @property
    def patches_per_grid(self) -> int:
        """Patches of one temporal grid, which is one attention segment."""
        return self.grid_thw[1] * self.grid_thw[2]

    @property
    def frames_dtype(self) -> str:
        return "float32" if self.resized else "uint8"

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """Shape of the frames on the wire: [frames, height, width, 3]."""
        if self.resized:
            return (self.num_frames, self.target_height, self.target_width, 3)
        return (self.num_frames, self.source_height, self.source_width, 3)

    def check(self, config: VisionTowerConfig, *, max_patches: int) -> None:
        """Raise InvalidRequest unless the sizes fit each other, the tower and its limit."""
        sizes = (
            self.num_frames,
            self.source_height,
            self.source_width,
            self.target_height,
            self.target_width,
        )
        if min(sizes) < 1:
            raise InvalidRequest("a frame count or size is not positive", field="plan")
        factor = config.patch_size * config.spatial_merge_size
        if self.target_height % factor or self.target_width % factor:
            raise InvalidRequest(
                f"target {self.target_height}x{self.target_width} is not a multiple of {factor}",
                field="plan.target_height",
            )
        expected = (
            -(-self.num_frames // config.temporal_patch_size),
            self.target_height // config.patch_size,
            self.target_width // config.patch_size,
        )
        if self.grid_thw != expected:
            raise InvalidRequest(
                f"grid {self.grid_thw} disagrees with {self.num_frames} frames of "
                f"{self.target_height}x{self.target_width}: expected {expected}",
                field="plan.grid_t",
            )
        if self.num_patches > max_patches:
            raise InvalidRequest(
                f"{self.num_patches} patches exceed this encoder's limit of {max_patches}",
                reason=Reason.MEDIA_LIMIT,
                field="plan.grid_t",
                limit=max_patches,
            )

    def check_frames(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise InvalidRequest unless these are the frames that the plan announces."""
        if (dtype, shape) != (self.frames_dtype, self.frames_shape):
            raise InvalidRequest(
                f"frames are {dtype}{list(shape)}, the plan says "
                f"{self.frames_dtype}{list(self.frames_shape)}",
                field="frames",
            )
