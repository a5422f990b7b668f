"""What a server's tap is told, by the file that EYAS_TAP names: what all engines' taps need."""

from dataclasses import dataclass

from .block import Layout


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server's tap is to do.

    Attributes:
        ring: path.
        events: path of the events file.
        aux_layer_ids: as in the store's manifest: the stream after so many decoder layers.
        encoding, final_encoding: of the ring's rows.
        hidden_size, num_layers: of the target, as Eyas read them from its folder.
        patience_s: how long a forward pass waits for room in a full ring.
    """

    ring: str
    events: str
    aux_layer_ids: list[int]
    encoding: str
    final_encoding: str
    hidden_size: int
    num_layers: int
    patience_s: float

    @property
    def layout(self) -> Layout:
        """What the ring's rows must hold."""
        return Layout(self.hidden_size, self.encoding, self.final_encoding)
