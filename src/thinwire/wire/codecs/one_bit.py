"""OneBit: the sign of every value, and one scale for all of them that keeps their norm.

    C[z] = (||z||_2 / sqrt(d)) * sign(z)          d: values of z, padding left out;  sign(0) = +1

The scale is taken over the worker's whole buffer and travels with each of its rows, so that a mean
needs no collective of its own for it. A row's payload, 4 + part/8 bytes with the first value in the
highest bit:

    [ scale : 4 bytes | signs, eight to a byte : part/8 bytes ]

A NaN or an infinity anywhere in the buffer makes the scale one, and with it every value. Use it
with `ErrorFeedback`: alone it forgets all magnitudes. mean|z| as a scale looks closer in one shot
and is several times worse with error feedback, where a mean must not shrink.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.wire.codecs.base import Codec, as_rows

_SCALE_BYTES = 4
_DENSE = torch.contiguous_format
_TILE = 1 << 16  # values handled at a time on a CPU: they stay in the second-level cache

# (256, 8): the signs that a byte stands for
_SIGNS = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * 2.0 - 1.0).astype("f4")


@dataclass(frozen=True)
class OneBit(Codec):
    """1 bit a value and 4 bytes a row: 32x less than float32."""

    def alignment(self, numel: int, rows: int) -> int:
        return 8

    def payload_bytes(self, part: int) -> int:
        return _SCALE_BYTES + part // 8

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        payload = torch.zeros(rows, self.payload_bytes(part), dtype=torch.uint8, device=x.device)
        signs = payload[:, _SCALE_BYTES:]
        pack = _pack_on_cpu if x.device.type == "cpu" else _pack
        payload[:, :_SCALE_BYTES] = pack(x, signs, part).view(1).view(torch.uint8)
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        signs, scales = _signs(payload), _scales(payload)
        if out.device.type == "cpu":
            into, tables = out.detach().numpy(), _tables(scales, out)
            for start, stop, row, column in _tiles(out.numel(), part, tile=part):
                _unpack_on_cpu(signs.numpy()[row, column:], tables[row], into[start:stop])
        else:
            _unpack(signs, scales, out)
        return out

    def lose(self, payload: Tensor, part: int, x: Tensor, scratch: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().lose(payload, part, x, scratch)
        signs, tables = _signs(payload).numpy(), _tables(_scales(payload), x)
        values, decoded = x.detach().numpy(), scratch.detach().numpy()[:_TILE]  # stays in the cache
        for start, stop, row, column in _tiles(values.size, part):
            tile = decoded[: stop - start]
            _unpack_on_cpu(signs[row, column:], tables[row], tile)
            values[start:stop] -= tile
        return x


def _signs(payload: Tensor) -> Tensor:
    return payload[:, _SCALE_BYTES:]


def _scales(payload: Tensor) -> Tensor:
    """(rows, 1). A row may begin anywhere in memory: its scale is copied out before it is read as a
    float."""
    return payload[:, :_SCALE_BYTES].clone(memory_format=_DENSE).view(torch.float32)


def _tables(scales: Tensor, like: Tensor) -> np.ndarray:
    """(rows, 256, 8): the values that a byte of a row stands for."""
    dtype = like.detach().numpy().dtype
    tables: np.ndarray = _SIGNS.astype(dtype) * scales.numpy()[:, :, None].astype(dtype)
    return tables


def _pack_on_cpu(x: Tensor, signs: Tensor, part: int) -> Tensor:
    """Signs and sum of squares in one pass, tile by tile; the sum of the tiles is a double."""
    values, into = x.detach().numpy(), signs.numpy()
    positive = np.empty(_TILE, dtype=bool)
    squares = 0.0
    for start, stop, row, column in _tiles(values.size, part):
        tile = values[start:stop]
        packed = np.packbits(np.greater_equal(tile, 0, out=positive[: tile.size]))
        into[row, column : column + packed.size] = packed
        squares += float(np.dot(tile, tile))
    scale = math.sqrt(squares / max(1, values.size)) if squares >= 0 else math.nan
    return torch.tensor(scale, dtype=torch.float32)


def _unpack_on_cpu(packed: np.ndarray, table: np.ndarray, into: np.ndarray) -> None:
    """As many signs as `into` has values."""
    whole = into.size // 8
    # mode: with the default numpy would check every index, and buffer the output for it
    values = into[: 8 * whole].reshape(whole, 8)
    np.take(table, packed[:whole], axis=0, out=values, mode="clip")
    if rest := into.size - 8 * whole:
        into[-rest:] = table[packed[whole], :rest]


def _tiles(numel: int, part: int, tile: int = _TILE) -> list[tuple[int, int, int, int]]:
    """(first value, end, row, byte in the row), none across two rows."""
    if part == 0:
        return []
    return [
        (start, min(start + tile, end, numel), begin // part, (start - begin) // 8)
        for begin, end in ((b, min(b + part, numel)) for b in range(0, numel, part))
        for start in range(begin, end, tile)
    ]


def _pack(x: Tensor, signs: Tensor, part: int) -> Tensor:
    """The same with tensor operations alone, for any device."""
    rows = signs.shape[0]
    bits = as_rows((x >= 0).to(torch.uint8), rows, part).view(rows, part // 8, 8)
    torch.sum(bits << _shifts(x.device), dim=2, dtype=torch.uint8, out=signs)
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    scale: Tensor = torch.linalg.vector_norm(x) / math.sqrt(x.numel())
    return scale.float()


def _unpack(signs: Tensor, scales: Tensor, out: Tensor) -> None:
    bits = (signs.unsqueeze(2) >> _shifts(out.device)) & 1  # (rows, part/8, 8)
    values = bits.to(out.dtype).mul_(2).sub_(1).mul_(scales.to(out.dtype).unsqueeze(2))
    out.copy_(values.view(-1)[: out.numel()])


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
