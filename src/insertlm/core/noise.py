"""Randomness as a pure function: a counter-based hash in integer tensor operations.

Every draw depends only on a seed and on counters such as (example, epoch, position). The same run on one or on eight
devices sees the same noise, resuming needs no generator state, and the draws work inside a CUDA graph.

The mixer is the 32-bit finaliser of MurmurHash3 (public-domain constants). Values are kept in int64 and cut to 32 bits,
because torch has no unsigned arithmetic; only `keep_mask`, which runs over whole activations, uses wrapping int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["chance", "column_keys", "hash32", "keep_mask", "randint", "stretch", "uniform"]

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32) in which every input bit changes about half of the output bits."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def hash32(seed: int, *counters: Tensor | int) -> Tensor:
    """A value in [0, 2^32) for every combination of the counters, which broadcast. Returns int64."""
    # Both halves of a 64-bit seed count. Every counter is mixed before it is added, so that neighbours lie far apart.
    state: Tensor | int = (seed ^ (seed >> 32)) & _LOW
    for counter in counters:
        state = _mix((state + _GOLDEN + _mix(torch.as_tensor(counter).long() & _LOW)) & _LOW)
    return torch.as_tensor(state)


def uniform(seed: int, *counters: Tensor | int) -> Tensor:
    """Floats in the open interval (0, 1)."""
    # Neither end is included, so both logarithms of the Gumbel trick are finite.
    return ((hash32(seed, *counters) >> 9).float() + 0.5) * 2.0**-23


def chance(share: float, seed: int, *counters: Tensor | int) -> Tensor:
    """True with this probability."""
    return hash32(seed, *counters) < int(share * (_LOW + 1))


def randint(high: Tensor, seed: int, *counters: Tensor | int) -> Tensor:
    """Integers uniform on {0 … high-1} (to one part in 2^32 / high)."""
    return (hash32(seed, *counters) * high) >> 32


def stretch(length: Tensor, size: Tensor, width: int, seed: int, *counters: Tensor | int) -> Tensor:
    """One run of `size` among the first `length` cells of each row. It begins anywhere and wraps around the end.
    length, size and the counters: [B]. Returns [B, width] bool"""
    first = randint(length, seed, *counters)
    cell = torch.arange(width, device=length.device)
    return (cell < length[:, None]) & ((cell - first[:, None]) % length[:, None].clamp(min=1) < size[:, None])


def column_keys(width: int) -> Tensor:
    """One odd number per column, for `keep_mask`. [width] int32"""
    return _int32(_mix(torch.arange(width) + 1)) | 1


def keep_mask(keys: Tensor, columns: Tensor, site: int, drop: float) -> Tensor:
    """Which activations dropout keeps, [T, width] bool.

    keys: [T] int32, one per row   columns: of `column_keys`   site: tells the places of use in a network apart
    """
    # A full mix of every cell would cost as much as the layer it drops from. So rows are mixed, and a cell costs one
    # product, whose high bits decide.
    x = keys ^ ((site * _GOLDEN + 2**31) % 2**32 - 2**31)
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x2C1B3C6D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x297A2D39
    rows = (x ^ ((x >> 16) & 0xFFFF)) | 1
    return rows[:, None] * columns >= int(drop * 2**32) - 2**31


def _int32(x: Tensor) -> Tensor:
    """[0, 2^32) to the int32 with the same bits."""
    return (x - ((x >> 31) << 32)).int()
