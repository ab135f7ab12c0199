"""Attention over packed rows is textbook attention within each segment, however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.packing import Packing, Segments
from insertlm.nn.attention import (
    Attention,
    CachedAttention,
    FewAttention,
    FullAttention,
    PrefixAttention,
    PrefixCache,
    attend,
)

Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
QKV = tuple[Tensor, Tensor, Tensor]
Sizes = list[tuple[int, int]]  # of each segment: rows of its prefix, other rows

HEADS, DIM = 2, 6
sizes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5).filter(
    lambda pairs: any(map(sum, pairs))
)
seeds = st.integers(0, 2**31)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel needs a CUDA device")


def segments_of(lengths: list[int], device: str = "cpu") -> Segments:
    return Segments(torch.tensor([0, *lengths], device=device).cumsum(0).int(), max(1, *lengths))


def owners(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def qkv(rows: int, seed: int, *, dim: int = DIM, dtype: torch.dtype = torch.float64) -> QKV:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, rows, HEADS, dim, generator=generator, dtype=torch.float64).to(dtype)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def prefix_attention(pairs: Sizes, device: str = "cpu") -> PrefixAttention:
    whole = segments_of([a + b for a, b in pairs], device)
    in_prefix = torch.tensor([row < a for a, b in pairs for row in range(a + b)], dtype=torch.bool, device=device)
    return PrefixAttention(whole, (~in_prefix).int())


def prefix_mask(pairs: Sizes) -> Tensor:
    """[T, T]: the same segment, and not from a prefix row to one beyond."""
    segment = owners([a + b for a, b in pairs])
    inside = torch.tensor([row < a for a, b in pairs for row in range(a + b)], dtype=torch.bool)
    return (segment[:, None] == segment) & (~inside[:, None] | inside)


def causal_mask(lengths: list[int]) -> Tensor:
    """[T, T]: the same segment, and not behind."""
    segment = owners(lengths)
    return (segment[:, None] == segment).tril()


def rows_to_come(prefixes: list[int], steps: int) -> tuple[Tensor, Tensor]:
    """Of packed sequences of a prefix and `steps` rows: all prefix rows, and the first row behind each prefix, [S]."""
    behind = (torch.tensor(prefixes) + steps).cumsum(0) - steps
    parts = [torch.arange(end - prefix, end) for end, prefix in zip(behind.tolist(), prefixes, strict=True)]
    return torch.cat(parts), behind


def value_and_gradients(output: Tensor, inputs: QKV) -> list[Tensor]:
    """The output, and gradients of a sum in which every entry has another weight."""
    weight = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output).to(output)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), inputs)]


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- Everywhere


@given(sizes, seeds)
def test_rows_see_their_segment(softmax_attention: Softmax, pairs: Sizes, seed: int) -> None:
    lengths = [a + b for a, b in pairs]
    x = qkv(sum(lengths), seed)
    segment = owners(lengths)
    expected = softmax_attention(*x, segment[:, None] == segment)
    found = FullAttention(segments_of(lengths))(0, *x)
    assert_same(value_and_gradients(found, x), value_and_gradients(expected, x))


@given(sizes, seeds)
def test_causal_rows_see_nothing_behind_them(softmax_attention: Softmax, pairs: Sizes, seed: int) -> None:
    lengths = [a + b for a, b in pairs]
    x = qkv(sum(lengths), seed)
    expected = softmax_attention(*x, causal_mask(lengths))
    found = FullAttention(segments_of(lengths), causal=True)(0, *x)
    assert_same(value_and_gradients(found, x), value_and_gradients(expected, x))


@given(sizes, seeds)
def test_queries_and_keys_may_be_different_rows(softmax_attention: Softmax, pairs: Sizes, seed: int) -> None:
    pairs = [(queries, keys + 1) for queries, keys in pairs]
    queries, keys = ([pair[k] for pair in pairs] for k in (0, 1))
    q, _, _ = qkv(sum(queries), seed)
    _, k, v = qkv(sum(keys), seed + 1)
    expected = softmax_attention(q, k, v, owners(queries)[:, None] == owners(keys))
    found = attend(q, k, v, segments_of(queries), segments_of(keys))
    assert_same([found], [expected])


@given(sizes, seeds)
def test_prefix_rows_see_the_prefix_and_the_others_everything(
    softmax_attention: Softmax, pairs: Sizes, seed: int
) -> None:
    x = qkv(sum(map(sum, pairs)), seed)
    expected = softmax_attention(*x, prefix_mask(pairs))
    found = prefix_attention(pairs)(0, *x)
    assert_same(value_and_gradients(found, x), value_and_gradients(expected, x))


def texts_of(sizes: list[list[int]]) -> Tensor:
    """[T]: of each segment rows of its prefix, 0, and of so many texts, 1, 2 …"""
    return torch.cat([owners(rows) for rows in sizes]).int()


def texts_mask(sizes: list[list[int]], causal: bool) -> Tensor:
    """[T, T]: the same segment, and the prefix or the same text."""
    segment, text = owners([sum(rows) for rows in sizes]), texts_of(sizes)
    same = text[:, None] == text
    return (segment[:, None] == segment) & ((same.tril() if causal else same) | (text == 0))


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), min_size=1), st.booleans(), seeds)
def test_texts_behind_one_prefix_do_not_see_each_other(
    softmax_attention: Softmax, sizes: list[list[int]], causal: bool, seed: int
) -> None:
    lengths = [sum(rows) for rows in sizes]
    x = qkv(sum(lengths), seed)
    expected = softmax_attention(*x, texts_mask(sizes, causal))
    found = PrefixAttention(segments_of(lengths), texts_of(sizes), causal=causal)(0, *x)
    assert_same(value_and_gradients(found, x), value_and_gradients(expected, x))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5), seeds, st.data())
def test_cached_rows_see_what_they_would_have_seen(pairs: Sizes, seed: int, data: st.DataObject) -> None:
    """Two layers, each with its own cache, of which some sequences leave."""
    prefix = prefix_attention(pairs)
    inside, segment = prefix.text == 0, owners([a + b for a, b in pairs])
    layers = [qkv(len(inside), seed + layer) for layer in (0, 1)]
    cache = PrefixCache.of([(k[inside], v[inside]) for _, k, v in layers], segments_of([a for a, _ in pairs]), room=5)
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(pairs))), min_size=1)))
    for kept, some in ((range(len(pairs)), cache), (chosen, cache.select(torch.tensor(chosen)))):
        current = torch.isin(segment, torch.tensor(list(kept))) & ~inside
        attention = CachedAttention(some, segments_of([pairs[s][1] for s in kept]))
        for layer, (q, k, v) in enumerate(layers):
            found = attention(layer, q[current], k[current], v[current])
            assert_same([found], [prefix(layer, q, k, v)[current]])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 4), seeds, st.data())
def test_rows_kept_one_by_one_are_causal_attention(
    prefixes: list[int], steps: int, seed: int, data: st.DataObject
) -> None:
    """Two layers; every step adds a row to each sequence still there, and some leave."""
    lengths = [prefix + steps for prefix in prefixes]
    layers = [qkv(sum(lengths), seed + layer) for layer in (0, 1)]
    expected = [FullAttention(segments_of(lengths), causal=True)(layer, *x) for layer, x in enumerate(layers)]
    start, behind = rows_to_come(prefixes, steps)
    cache = PrefixCache.of([(k[start], v[start]) for _, k, v in layers], segments_of(prefixes), room=steps)
    here = torch.arange(len(prefixes))
    for step in range(steps):
        current = behind[here] + step
        attention = CachedAttention(cache, segments_of([1] * len(here)))
        for layer, (q, k, v) in enumerate(layers):
            assert_same([attention(layer, q[current], k[current], v[current])], [expected[layer][current]])
        stay = torch.tensor(sorted(data.draw(st.sets(st.sampled_from(range(len(here))), min_size=1))))
        here, cache = here[stay], attention.kept.select(stay)


def test_current_rows_do_not_stay_unless_kept() -> None:
    _, k, v = qkv(4, 0)
    cache = PrefixCache.of([(k, v)], segments_of([2, 2]), room=1)
    here, there = ([x.detach() for x in qkv(2, seed)] for seed in (1, 2))
    first = CachedAttention(cache, segments_of([1, 1]))(0, *here)
    CachedAttention(cache, segments_of([1, 1]))(0, *there)
    assert torch.equal(CachedAttention(cache, segments_of([1, 1]))(0, *here), first)


def test_a_recorder_keeps_keys_and_values_of_every_layer() -> None:
    record: list[tuple[Tensor, Tensor]] = []
    attention: Attention = FullAttention(segments_of([2, 3]), record)
    layers = [qkv(5, seed) for seed in (0, 1)]
    outputs = [attention(layer, *x) for layer, x in enumerate(layers)]
    assert_same(outputs, [FullAttention(segments_of([2, 3]))(0, *x) for x in layers])
    for (k, v), (_, expected_k, expected_v) in zip(record, layers, strict=True):
        assert torch.equal(k, expected_k)
        assert torch.equal(v, expected_v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spare", [0, 1, 5, 17])
def test_a_spare_tail_changes_nothing_and_stays_finite(spare: int, causal: bool) -> None:
    keep = torch.tensor([[True, True, False, True], [True, False, False, False], [False, True, True, True]])
    tight, roomy = Packing(keep), Packing(keep, 7 + spare)
    x = qkv(7 + spare, 3)
    head = [part[:7].detach().requires_grad_() for part in x]
    found = FullAttention(roomy.segments, causal=causal)(0, *x)
    expected = FullAttention(tight.segments, causal=causal)(0, *head)
    assert bool(found.isfinite().all())
    assert_same([found[:7]], [expected])
    gradients = torch.autograd.grad(found[:7].square().sum(), x)
    assert_same([gradient[:7] for gradient in gradients], torch.autograd.grad(expected.square().sum(), head))
    assert all(bool((gradient[7:] == 0).all()) for gradient in gradients)


# --- On a GPU

CASES: list[Sizes] = [
    [(0, 5)],
    [(3, 4), (0, 1), (7, 0), (64, 65)],
    [(100, 30), (90, 12), (0, 0), (128, 1)],
    [(1000, 150), (0, 1), (128, 129)],
    [(0, 400), (130, 300)],
]


def attention_of(kind: str, pairs: Sizes) -> tuple[Attention, int, int]:
    """The attention, how many rows are real, and how many there are."""
    real = sum(map(sum, pairs))
    if kind == "prefix":
        return prefix_attention(pairs, "cuda"), real, real
    if "texts" in kind:
        sizes = [[a, b // 3, 0, b - b // 3] for a, b in pairs]
        whole, text = segments_of([sum(rows) for rows in sizes], "cuda"), texts_of(sizes).cuda()
        return PrefixAttention(whole, text, causal=kind.startswith("causal")), real, real
    width = max(map(sum, pairs))
    keep = torch.arange(width) < torch.tensor([a + b for a, b in pairs])[:, None]
    capacity = real + 100 if kind.endswith("tail") else None
    packing = Packing(keep.cuda(), capacity)
    return FullAttention(packing.segments, causal=kind.startswith("causal")), real, packing.total


@cuda
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("kind", ["full", "tail", "prefix", "texts", "causal", "causal tail", "causal texts"])
@pytest.mark.parametrize("pairs", CASES, ids=["one", "four", "two tiles", "long", "behind"])
def test_the_kernel_is_sdpa_to_the_precision_of_bfloat16(pairs: Sizes, kind: str, dim: int) -> None:
    """Same rounded inputs: bfloat16 takes the kernel, float32 takes SDPA."""
    attention, real, rows = attention_of(kind, pairs)
    half = [x.detach().cuda().requires_grad_() for x in qkv(rows, 0, dim=dim, dtype=torch.bfloat16)]
    full = [x.detach().float().requires_grad_() for x in half]
    found, expected = attention(0, *half), attention(0, *full)
    weight = torch.randn(real, HEADS, dim, generator=torch.Generator().manual_seed(1)).cuda()
    found_gradients = torch.autograd.grad((found[:real] * weight).sum(), half)
    expected_gradients = torch.autograd.grad((expected[:real] * weight).sum(), full)
    assert bool(found.isfinite().all())
    for a, b in zip([found, *found_gradients], [expected, *expected_gradients], strict=True):
        torch.testing.assert_close(a[:real].float(), b[:real], rtol=2e-2, atol=2e-2)
        assert bool(a.isfinite().all())


@cuda
def test_the_cached_kernel_is_the_prefix_one() -> None:
    pairs = [(3, 4), (1, 1), (7, 2), (64, 65), (128, 1)]
    prefix = prefix_attention(pairs, "cuda")
    inside, segment = prefix.text == 0, owners([a + b for a, b in pairs]).cuda()
    q, k, v = (x.detach().cuda() for x in qkv(len(inside), 0, dim=64, dtype=torch.bfloat16))
    expected = prefix(0, q, k, v)
    cache = PrefixCache.of([(k[inside], v[inside])], segments_of([a for a, _ in pairs], "cuda"), room=65)
    for kept, some in (([0, 1, 2, 3, 4], cache), ([1, 3], cache.select(torch.tensor([1, 3]).cuda()))):
        current = torch.isin(segment, torch.tensor(kept).cuda()) & ~inside
        attention = CachedAttention(some, segments_of([pairs[s][1] for s in kept], "cuda"))
        found = attention(0, q[current], k[current], v[current])
        torch.testing.assert_close(found.float(), expected[current].float(), rtol=2e-2, atol=2e-2)


@cuda
@pytest.mark.parametrize("rows", [2, 16, 70])
def test_few_queries_with_spare_rows_are_the_cached_kernel(rows: int) -> None:
    prefixes, counts = [3, 1, 7, 64, 128, 150], [min(rows, count) for count in (1, 2, 70, 5, 16, 33)]
    start = torch.tensor([p + c for p, c in zip(prefixes, counts, strict=True)], dtype=torch.int32).cuda()
    k, v = (x.detach().cuda() for x in qkv(sum(prefixes), 0, dim=64, dtype=torch.bfloat16)[1:])
    cache = PrefixCache.of([(k, v)], segments_of(prefixes, "cuda"), room=rows)
    spare = [x.detach().cuda() for x in qkv(rows * len(counts), 1, dim=64, dtype=torch.bfloat16)]
    real = (torch.arange(rows) < torch.tensor(counts)[:, None]).flatten().cuda()
    found = FewAttention(cache, start, rows)(0, *spare)[real]
    expected = CachedAttention(cache, segments_of(counts, "cuda"))(0, *(x[real] for x in spare))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@cuda
def test_kept_rows_are_the_causal_kernel() -> None:
    prefixes, steps = [3, 1, 7, 64, 128], 5
    lengths = [prefix + steps for prefix in prefixes]
    q, k, v = (x.detach().cuda() for x in qkv(sum(lengths), 0, dim=64, dtype=torch.bfloat16))
    expected = FullAttention(segments_of(lengths, "cuda"), causal=True)(0, q, k, v)
    start, behind = (rows.cuda() for rows in rows_to_come(prefixes, steps))
    cache = PrefixCache.of([(k[start], v[start])], segments_of(prefixes, "cuda"), room=steps)
    for step in range(steps):
        current = behind + step
        attention = CachedAttention(cache, segments_of([1] * len(prefixes), "cuda"))
        found = attention(0, q[current], k[current], v[current])
        torch.testing.assert_close(found.float(), expected[current].float(), rtol=2e-2, atol=2e-2)
        cache = attention.kept


@pytest.mark.parametrize(("mine", "theirs"), [([2, 1], [5]), ([5], [1, 2]), ([3], [3])])
def test_sequences_of_joined_caches_see_what_they_saw_apart(mine: list[int], theirs: list[int]) -> None:
    """Whichever have the longer prefixes."""
    prefixes, room = [*mine, *theirs], 2
    x = [part.detach() for part in qkv(sum(prefixes), 0)]
    parts = [torch.split(part, [sum(mine), sum(theirs)]) for part in x]
    ours, other = (
        PrefixCache.of([(parts[1][i], parts[2][i])], segments_of(some), room=1) for i, some in enumerate((mine, theirs))
    )
    whole = PrefixCache.of([(x[1], x[2])], segments_of(prefixes), room)
    current = [part.detach() for part in qkv(room * len(prefixes), 1)]
    found, expected = (
        CachedAttention(cache, segments_of([room] * len(prefixes)))(0, *current)
        for cache in (ours.join(other, room), whole)
    )
    assert_same([found], [expected])
