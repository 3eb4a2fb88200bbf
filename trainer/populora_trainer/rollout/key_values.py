"""A key-value cache that is written in place, so that a decoding step does not copy everything before it."""

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

BLOCK = 64  # tokens by which a layer grows


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values (row, head, token, size) in buffers that grow by blocks of tokens.

    `DynamicLayer` concatenates, which copies the whole cache at every token: 15 to 30 % of a decoding step of the nano
    base on CPU.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < stop:
            self._buffers = (self._grown(self.keys, key_states, stop), self._grown(self.values, value_states, stop))
        keys, values = self._buffers
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values

    @staticmethod
    def _grown(old: Tensor, new: Tensor, tokens: int) -> Tensor:
        capacity = -(-tokens // BLOCK) * BLOCK
        buffer = new.new_empty(*new.shape[:2], capacity, new.shape[-1])
        if old.numel():
            buffer[:, :, : old.shape[-2]] = old
        return buffer

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, drop or repeat rows: row i becomes what row `beam_idx[i]` was."""
        super().reorder_cache(beam_idx)
        self._buffers = None


def growing_cache(config: PretrainedConfig) -> Cache:
    """Return an empty cache for a model, with plain attention layers replaced by `GrowingLayer`.

    Layers with a window, a state or an index of their own stay as transformers makes them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def take_rows(cache: Cache, rows: Tensor) -> None:
    """Let row i of every layer become what row `rows[i]` was; rows may be dropped and repeated."""
    for layer in cache.layers:
        layer.reorder_cache(rows)
