"""What several tests lean on: a tiny model, a test of frequencies, and attention as the textbook writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from lettering import Few, build
from torch import Tensor

from insertlm.families.base import Family
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

# The machines that run tests are shared: how long one example takes says nothing.
settings.register_profile("insertlm", deadline=None, print_blob=True)
settings.load_profile("insertlm")

# Models here are tiny: threads cost more than they bring, and on a busy machine many times more.
torch.set_num_threads(1)


USUAL = IlmConfig()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes half a minute or more; runs only with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(scope="session")
def tiny_ilm() -> Callable[..., ILM]:
    """A model of a few hundred weights in float64, not trained, ready to decode. Words are ids 0 … words-1."""

    def build(
        *,
        words: int = 6,
        prefix_lm: bool = False,
        dropout: float = 0.0,
        config: IlmConfig = USUAL,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> ILM:
        model = ModelConfig(layers=2, width=8, heads=2, hidden=12, dropout=dropout, prefix_lm=prefix_lm)
        tokenizer = WordTokenizer(tuple(map(str, range(words))), reserved=1)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ilm = config.build(model, tokenizer)
        return ilm.to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def letters() -> Family:
    """A model of text, not trained."""
    return build(IlmConfig())


@pytest.fixture(scope="session")
def few() -> Family:
    """The same, which writes a few words and letters alone."""
    return build(IlmConfig(), Few)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave nothing in the user's cache, and find nothing there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSERTLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def fits() -> Callable[[Tensor, Tensor], bool]:
    """Whether counts are what draws from these probabilities would give: Pearson's chi-square.

    The threshold is a bound of Laurent and Massart: right counts fail with odds below one in 10^9.
    """

    def judge(counts: Tensor, probabilities: Tensor) -> bool:
        counts, probabilities = counts.flatten().double(), probabilities.flatten().double()
        possible = probabilities > 0
        if bool(counts[~possible].any()):
            return False
        expected = counts.sum() * probabilities[possible] / probabilities.sum()
        assert float(expected.min()) >= 5, "too few draws for a chi-square test"
        statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
        freedom, odds = int(possible.sum()) - 1, math.log(1e9)
        return statistic <= freedom + 2 * math.sqrt(freedom * odds) + 2 * odds

    return judge


@pytest.fixture(scope="session")
def softmax_attention() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """q: [Tq, H, D], k and v: [Tk, H or a divisor of it, D], mask: [Tq, Tk] bool, who sees whom. Returns [Tq, H, D]."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attention


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, and its counters at zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
