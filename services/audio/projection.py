"""From a group of local states to one row of the language model's width."""

from torch import Tensor, nn

from services.audio.config import AudioEncoderConfig


class Projection(nn.Module):
    """Two linear maps with an exact GELU between. Attribute names are the checkpoint's."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(config.group_dim, config.projection_hidden_dim, bias=False),
            nn.GELU(),
            nn.Linear(config.projection_hidden_dim, config.out_hidden_size, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [G, group dim] -> [G, hidden]."""
        out: Tensor = self.mlp(x)
        return out


def make_projection(config: AudioEncoderConfig) -> nn.Module:
    """The projection a configuration asks for: one plain linear map, or two."""
    if config.projection_layers == 1:
        return nn.Linear(config.group_dim, config.out_hidden_size, bias=False)
    return Projection(config)
