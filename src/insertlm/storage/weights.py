"""Released weights in small files.

Two forms, for matrices:
- **bytes** (`pack`): a byte for every entry. The largest entry of a row becomes ±127, and the factor of each row is
  stored as `<matrix>/scale`, float32.
- **groups** (`pack_groups`): four or five bits for every entry, by BITS. Each group of 32 entries of a row has a factor
  of its own, in bfloat16: the entry that is farthest from 0 becomes the lowest code, -8 or -16, so the factor has that
  entry's sign reversed. Matrices whose rows are not whole groups, or that BITS does not name, are stored as bytes.

`rounded` is the grid of the second form, and training with `optim.rounded` reads its weights through it: what was
trained so loses nothing more when it is packed. Weights that lie on the grid already are not changed by it, so that
packing an unpacked model gives the same file.

Vectors are stored in bfloat16. `unpack` reads both forms, by the shapes and types of what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError

__all__ = ["BITS", "GROUP", "Unpacked", "bits_of", "pack", "pack_groups", "rounded", "unpack"]

_SCALE = "/scale"
GROUP = 32
# By the last part of a matrix's name. Measured with SmolLM2-135M, one kind of matrix at four bits and all else as it
# was: for each weight, `up` and `out` cost half of what the others cost (docs/export.md).
BITS = {"embedding": 5, "unembedding": 5, "qkv": 5, "out": 4, "up": 4, "down": 5}
_PIECE = 1 << 19  # entries unpacked at once: what is in between stays in the processor's cache


def bits_of(name: str, shape: Sequence[int]) -> int:
    """How many bits an entry has in a release by groups; 0 = it is not stored so."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    return BITS.get(kind, 0) if len(shape) == 2 and shape[1] % GROUP == 0 else 0


def rounded(groups: Tensor, bits: int) -> Tensor:
    """Weights as they will be read from a file. groups: [N, GROUP]"""
    scale = _scale(groups, bits)
    return _codes(groups, scale, bits) * scale


def _scale(groups: Tensor, bits: int) -> Tensor:
    """[N, 1], in the precision of the groups but with the values of bfloat16."""
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    # The code -8 is there and +8 is not, so it goes to the entry that needs it most.
    peak = torch.where(highest > -lowest, highest, lowest)
    scale = (peak / -(1 << bits - 1)).bfloat16().to(groups.dtype)
    return torch.where(scale == 0.0, 1.0, scale)  # of zeros; any factor gives them back


def _codes(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    half = 1 << bits - 1
    return (groups / scale).round().clamp(-half, half - 1)


# --- Writing


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to a byte for every entry, the rest to bfloat16."""
    packed = {}
    for name, value in weights.items():
        if value.dim() < 2:
            packed[name] = value.bfloat16()
            continue
        # A row of zeros has no largest entry; any factor gives it back.
        scale = value.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        packed[name] = (value.float() / scale).round().to(torch.int8)
        packed[name + _SCALE] = scale
    return packed


def pack_groups(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to groups, as far as BITS goes; the rest as `pack` does it."""
    packed: dict[str, Tensor] = {}
    for name, value in weights.items():
        bits = bits_of(name, value.shape)
        if not bits:
            packed |= pack({name: value})
            continue
        groups = value.float().view(len(value), -1, GROUP)
        scale = _scale(groups, bits)
        codes = (_codes(groups, scale, bits) + (1 << bits - 1)).to(torch.uint8)
        packed[name] = _joined(codes.view(len(value), -1), bits)
        packed[name + _SCALE] = scale.squeeze(-1).bfloat16()
    return packed


# Codes are cut into planes of 4, 2 and 1 bits, the lowest first. A byte of a plane holds the bits of entries that are
# far apart, so that unpacking writes runs of neighbours: a row's first entries are in the lowest bits of its bytes.
def _planes(bits: int) -> list[int]:
    return [width for width in (4, 2, 1) if bits & width]


def _joined(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R, C] to [R, C·bits / 8]"""
    planes = []
    for width in _planes(bits):
        low = codes & ((1 << width) - 1)
        codes = codes >> width
        parts = low.view(len(low), 8 // width, -1)
        planes.append(sum(parts[:, i] << i * width for i in range(8 // width)))
    return torch.cat([plane for plane in planes if isinstance(plane, Tensor)], 1)


# --- Reading


class Unpacked(Mapping[str, Tensor]):
    """What is in a file: weights by their names, in either form or as they were. Shapes are known without unpacking,
    and each matrix is unpacked when it is asked for, so that they need not be in memory together.

    in_groups: whether some are stored in groups
    """

    def __init__(self, packed: Mapping[str, Tensor]) -> None:
        self._packed = packed
        self.in_groups = any(value.dtype == torch.uint8 for value in packed.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises InsertlmError if what is stored of a matrix does not fit together."""
        value, scale = self._packed[name], self._scale_of(name)
        if scale is None:
            return tuple(value.shape)
        columns = scale.shape[-1] * GROUP if value.dtype == torch.uint8 else value.shape[-1]
        sizes = [columns * bits // 8 for bits in range(1, 8)] if value.dtype == torch.uint8 else [columns]
        if value.dim() != 2 or scale.dim() != 2 or len(scale) != len(value) or value.shape[1] not in sizes:
            found = tuple(value.shape), tuple(scale.shape)
            raise InsertlmError(f"{name} is packed as {found[0]} with scales {found[1]}, which do not fit together")
        return len(value), columns

    def finite(self, name: str) -> bool:
        """Whether all entries are numbers. Packed ones are, if their factors are."""
        scale = self._scale_of(name)
        value = self._packed[name] if scale is None else scale
        # One pass without a copy: the least and the largest are NaN if any entry is.
        return not value.numel() or all(bool(edge.isfinite()) for edge in value.detach().aminmax())

    def write(self, name: str, out: Tensor) -> None:
        """Unpack into a tensor of any precision, on any device."""
        value, scale = self._packed[name], self._scale_of(name)
        if scale is None:
            out.copy_(value)
        elif value.dtype == torch.uint8 and out.device.type == "cpu":
            _from_groups(value, scale, out)
        else:
            out.copy_(self[name])

    def __getitem__(self, name: str) -> Tensor:
        value, scale = self._packed[name], self._scale_of(name)
        if scale is None:
            return value
        return (
            _from_groups(value, scale, torch.empty(self.shape(name))) if value.dtype == torch.uint8 else value * scale
        )

    def _scale_of(self, name: str) -> Tensor | None:
        return self._packed.get(name + _SCALE)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._packed if not name.endswith(_SCALE))

    def __len__(self) -> int:
        return len(list(iter(self)))


def unpack(packed: Mapping[str, Tensor]) -> Unpacked:
    """The inverse of both ways to pack, in float32; weights that were not packed stay as they are."""
    return Unpacked(packed)


def _from_groups(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Into `out`, [R, C], whose precision rounds each product once."""
    rows, columns = out.shape
    bits = packed.shape[1] * 8 // columns
    words = packed.view(torch.int32)  # four bytes at once; groups of 32 entries make rows whole words
    step = max(1, _PIECE // columns)
    piece = torch.empty(min(step, rows), columns)  # in float32, where products of this shape are fast
    for first in range(0, rows, step):
        part = slice(first, first + step)
        values = piece[: len(out[part])].copy_(_split(words[part], bits, columns).sub_(1 << bits - 1))  # modulo 256
        values.view(len(values), -1, GROUP).mul_(scale[part, :, None].float())
        out[part].copy_(values)
    return out


def _split(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `_joined`. words: [R, C·bits / 32] int32. Returns int8 [R, C]"""
    codes = torch.zeros(len(words), columns // 4, dtype=torch.int32)
    at = shift = 0
    for width in _planes(bits):
        length = columns * width // 32
        plane = words[:, at : at + length]
        mask = ((1 << width) - 1) * 0x01010101  # in each byte; what a shift brings over from the next one is cut off
        for i in range(8 // width):
            codes[:, i * length : (i + 1) * length] |= ((plane >> i * width) & mask) << shift
        at, shift = at + length, shift + width
    return codes.view(torch.int8)
