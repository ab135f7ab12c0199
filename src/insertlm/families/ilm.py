"""The Insertion Language Model: the method of the paper, whole, in one file.

Design choices, the published ones unless said:
- A row reads `<stop> prefix <bos> text`; no end token. (<stop> is stored behind the prefix but keeps position 0, so
  that prefix rows are contiguous and, with `prefix_lm`, can be computed once.)
- Corruption: n uniform on {0 … L}, n of the L target tokens deleted, the survivors closed up. n = 0 teaches to stop.
  (`stretch`, not the paper's: for that share of the examples n is uniform on {0 … S}, and all deleted tokens lie in one
  stretch of S, which may run over the end to the beginning. So the model sees what infilling asks for. `group`, not the
  paper's either: where every so many tokens end in one that has to be found out and the others are a mere frame, the
  model learns to write the frame first, from left to right, and then the ends in any order. Of n deleted tokens those
  are asked for that may come next. n is uniform within either part, and `frame` is the share of the first.
  `solver`, nor this: in that share of the corruptions those tokens go that are found last by somebody who solves the
  task, where it knows. `deletions`, nor this: so many corruptions of an example in one step, behind one prefix, which
  with `prefix_lm` is the same for all.)
- One softmax over slots × vocabulary; slot k means "right behind the k-th visible token". The target is the empirical
  distribution of the deleted tokens over their slots. All visible tokens but <stop> are slots in training, prefix too;
  in decoding only <bos> and what follows it.
- The stop classifier is a small residual network on <stop>'s hidden row; class 0 means complete. (The published one has
  dropout inside.)
- Decoding asks the stop classifier first, then chooses a slot by its mass and a token in it. Special tokens do not take
  part, in the slot's mass either. What a prompt demands, see inference/constraints.py, limits slots and words, and can
  overrule the stop classifier. (`decode.order` knows other ways to choose a slot, which are not the paper's, see
  inference/policies.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import chance, hash32, randint, stretch
from insertlm.core.packing import Packing
from insertlm.core.section import Count, Fraction, NonNegative
from insertlm.families import groups
from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, FamilyConfig, Losses, Noise, Rows
from insertlm.families.insertion import InsertionWriter, spread
from insertlm.inference import policies
from insertlm.inference.engine import exclusively
from insertlm.inference.sampling import choose, draws
from insertlm.inference.scope import Scope
from insertlm.inference.score import Score, restoring_gaps, with_each_left_out
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import Step, Writer
from insertlm.nn.attention import FullAttention, PrefixAttention
from insertlm.nn.losses import slot_scores
from insertlm.nn.transformer import ModelConfig
from insertlm.tasks.base import Examples, Task
from insertlm.text.tokenizers import Tokenizer

__all__ = ["ILM", "Corrupted", "IlmConfig", "corrupt"]

# Streams of noise: what a draw is for. Target positions follow from _PLACES on.
_COUNT, _DROPOUT, _PLACES = 0, 1, 2
_STRETCHED, _FIRST, _SIZE, _FRAME, _SOLVER = -1, -2, -3, -4, -5
_HASHES = 1 << 32  # how many there are
_SLOT, _TOKEN = 0, 1
_POLICIES: dict[str, policies.Policy] = {
    "mass": policies.mass,
    "certainty": policies.certainty,
    "margin": policies.margin,
}


class IlmConfig(FamilyConfig, frozen=True, kw_only=True, tag="ilm"):
    """The `family` section of a recipe for an ILM."""

    stop_weight: NonNegative = 1.0
    stretch: Fraction = 0.0  # of the examples, in which only one stretch is up for deletion
    group: Count = 1  # tokens that belong together, of which the last has to be found out, as in zebra puzzles
    frame: Fraction = 0.1  # with groups: of the examples, in which the others are still being written
    solver: Fraction = 0.0  # of the corruptions, in which a solver has found what is left, and nothing else yet
    deletions: Count = 1  # of each example in a step; more than one need model.prefix_lm

    def __post_init__(self) -> None:
        if self.group > 1 and self.stretch:
            raise ValueError("stretch and group are two ways to choose what is deleted; expected stretch 0 or group 1")

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> ILM:
        if self.deletions > 1 and not model.prefix_lm:
            raise InsertlmError(f"family.deletions: expected 1 unless model.prefix_lm is true, got {self.deletions}")
        return ILM(self, model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        return prefix + target + ILM.framing

    def check_task(self, task: Task) -> None:
        if self.solver and not task.has_solving_order:
            raise ValueError(f"family.solver is {self.solver}; expected 0 for a task without a solver")


PUBLISHED = IlmConfig()

# --- Corruption -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corrupted:
    """A batch after deletion, packed: each of B examples as its prefix and D corrupted texts. N = B * D

    tokens, positions: [T]   text: [T] int32, 1 … D, 0 in a prefix   dropout: [T] int32 keys
    packing: of the matrix of all cells, [B, P + D (2 + L)]: the prefix, then <stop>, <bos> and the target, D times
    deleted: [N, L] bool   wanted: [N, L] bool, of these the ones that may come next   count: [N], of these
    slots: [N, L] packed row of the slot each target cell belongs to   stop: [N] packed row of <stop>
    """

    tokens: Tensor
    positions: Tensor
    text: Tensor
    dropout: Tensor
    packing: Packing
    deleted: Tensor
    wanted: Tensor
    count: Tensor
    slots: Tensor
    stop: Tensor

    def by_text(self, cells: Tensor) -> Tensor:
        """Cells as `packing` has them, of each text with its prefix, without <stop>: [N, P + 1 + L]"""
        texts, width = len(self.deleted) // len(cells), 2 + self.deleted.shape[1]
        front, back = cells[:, : -texts * width], cells[:, -texts * width :].reshape(-1, width)
        return torch.cat([front.repeat_interleave(texts, 0), back[:, 1:]], 1)


def stretch_size(length: Tensor, noise: Noise, share: float) -> Tensor:
    """How many tokens are up for deletion: all, or for a share of the examples any number of them. [B]"""
    if not share:
        return length
    some = randint(length, *noise, _SIZE) + 1
    stretched = chance(share, *noise, _STRETCHED)
    return torch.where(stretched, torch.minimum(some, length), length)


def deletion_count(length: Tensor, noise: Noise, config: IlmConfig = PUBLISHED) -> Tensor:
    """n ~ U{0 … L}, or within a stretch; of groups, up to all ends, or more than those. length: [B], of the targets.
    Returns [B]"""
    if config.group == 1:
        size = stretch_size(length, noise, config.stretch)
        return randint(size + 1, *noise, _COUNT)
    ends = length // config.group
    some = randint(ends + 1, *noise, _COUNT)
    more = ends + 1 + randint((length - ends).clamp(min=1), *noise, _SIZE)
    unfinished = chance(config.frame, *noise, _FRAME)
    return torch.where(unfinished, torch.minimum(more, length), some)


def deletions(
    length: Tensor, width: int, noise: Noise, config: IlmConfig = PUBLISHED, found: Tensor | None = None
) -> Tensor:
    """Which target tokens go: n of those that may, every subset of that size equally likely, or the last found. Of
    groups, all ends before the others, and these from the right. length: [B]   found: [B, width], as of Rows
    Returns [B, width] bool"""
    count = deletion_count(length, noise, config)[:, None]
    column = torch.arange(width, device=length.device)
    draw = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], _PLACES + column)
    if found is not None:
        draw = torch.where(chance(config.solver, *noise, _SOLVER)[:, None], -found, draw)  # the smallest goes first
    may_go = column < length[:, None]
    if config.group > 1:
        end, frame = groups.is_end(column, config.group) & may_go, groups.frame_behind(column, length, config.group)
        key = draw * width + column  # no two are equal
        rank = ((key[:, None] < key[:, :, None]) & end[:, None]).sum(2)  # few: no need to sort
        return torch.where(end, rank < count, may_go & (frame < count - length[:, None] // config.group))
    if config.stretch:
        size = stretch_size(length, noise, config.stretch)
        may_go = stretch(length, size, width, *noise, _FIRST)
    draw = torch.where(may_go, draw, _HASHES)  # the others go last
    order = draw.argsort(dim=1, stable=True)
    return torch.zeros_like(draw, dtype=torch.bool).scatter(1, order, column < count)


def _visits(length: Tensor, noise: Noise, times: int) -> tuple[Tensor, Noise]:
    """Every example so many times, with noise of its own each time: as many epochs in one. length: [B]"""
    epoch = noise.epoch[:, None] * times + torch.arange(times, device=length.device)
    example = noise.example.repeat_interleave(times)
    return length.repeat_interleave(times), Noise(noise.seed, example, epoch.flatten())


def corrupt(rows: Rows, noise: Noise, capacity: int | None = None, config: IlmConfig = PUBLISHED) -> Corrupted:
    """Delete, close up and pack."""
    batch, times, width = len(rows.target), config.deletions, rows.given.shape[1] - 2
    prefix, column = rows.given_length - 2, torch.arange(width, device=rows.given.device)
    length, each = _visits(rows.target_length, noise, times)
    found = None if rows.solving_order is None else rows.solving_order.repeat_interleave(times, 0)
    deleted = deletions(length, rows.target.shape[1], each, config, found)
    wanted = groups.next_ones(deleted, length, config.group)
    there = torch.arange(deleted.shape[1], device=length.device) < length[:, None]
    survive = F.pad(there & ~deleted, (2, 0), value=True)  # <stop> and <bos> always do
    packing = Packing(torch.cat([column < prefix[:, None], survive.view(batch, -1)], 1), capacity)
    where = packing.where[:, width:].reshape_as(survive)
    place = where - where[:, :1] + prefix.repeat_interleave(times)[:, None]
    place[:, 0] = 0  # <stop>
    ahead = (column + 1).expand(batch, -1)
    keys = [
        hash32(noise.seed, example[:, None], epoch[:, None], _DROPOUT, position)
        for example, epoch, position in ((noise.example, noise.epoch * times, ahead), (*each[1:], place))
    ]
    specials = rows.given.gather(1, prefix[:, None] + torch.arange(2, device=prefix.device))
    texts = torch.cat([specials, rows.target], 1).repeat(1, times)
    number = torch.arange(1, times + 1, device=prefix.device).repeat_interleave(survive.shape[1])

    def pack(front: Tensor, back: Tensor) -> Tensor:
        return packing.pack(torch.cat([front, back.reshape(batch, -1)], 1))

    return Corrupted(
        tokens=pack(rows.given[:, :width], texts),
        positions=pack(ahead, place),
        text=pack(torch.zeros_like(ahead), number.expand(batch, -1)).int(),
        dropout=pack(*keys).int(),
        packing=packing,
        deleted=deleted,
        wanted=wanted,
        count=wanted.sum(1),
        slots=where[:, 2:],
        stop=where[:, 0],
    )


# --- Model ------------------------------------------------------------------------------------------------------------


class StopHead(nn.Module):
    """Two logits, complete and incomplete, from <stop>'s hidden row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 2, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, width] to [B, 2]"""
        logits: Tensor = self.out(hidden + self.down(torch.tanh(self.up(self.norm(hidden)))))
        return logits


class ILM(Family):
    abilities = Abilities(orders=tuple(_POLICIES), draws_places=True, stop_threshold=True, supports_constraints=True)

    def __init__(self, config: IlmConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        self.config = config
        self.unembedding = nn.Linear(model.width, tokenizer.size, bias=False)
        self.stop = StopHead(model.width)

    # --- Learning

    def rows(self, examples: Examples) -> Rows:
        rows = Rows.of(examples, self.specials.stop, self.specials.bos)
        if not self.config.solver:
            return rows
        assert examples.solving_order is not None  # a recipe has been asked
        return replace(rows, solving_order=torch.from_numpy(examples.solving_order).long())

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        length, each = _visits(rows.target_length, noise, self.config.deletions)
        texts = 2 + length - deletion_count(length, each, self.config)
        return rows.given_length - 2 + texts.view(len(rows.target_length), -1).sum(1)

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """The token insertion loss and the stop loss, each a plain mean over corrupted texts."""
        x = corrupt(rows, noise, capacity, self.config)
        seen = x.packing.segments
        attention = PrefixAttention(seen, x.text) if self.model.prefix_lm else FullAttention(seen)
        hidden = self.backbone(x.tokens, x.positions, attention, keys=x.dropout if self.training else None)
        target = rows.target.repeat_interleave(self.config.deletions, 0)
        mass, score = slot_scores(hidden, self.unembedding.weight, x.slots.flatten(), target.flatten())
        with torch.autocast(hidden.device.type, enabled=False):  # the rest in full precision
            token_loss = self._token_loss(mass, score.view_as(target), x)
            stop_logits = self.stop(hidden.index_select(0, x.stop))
            stop_loss = F.cross_entropy(stop_logits, (x.count > 0).long())
        total = token_loss + self.config.stop_weight * stop_loss
        return Losses(total, {"token_loss": token_loss.detach(), "stop_loss": stop_loss.detach()})

    def _token_loss(self, mass: Tensor, score: Tensor, x: Corrupted) -> Tensor:
        """logsumexp of all slots' mass − mean score of the wanted tokens in their slots; 0 where none is deleted.

        mass: [T]   score: [N, L], of every target token in its slot
        """
        where, is_slot = (x.by_text(part) for part in (x.packing.where, x.packing.keep))
        slots = mass.gather(0, where.clamp(min=0).flatten()).view_as(where)
        log_total = slots.masked_fill(~is_slot, -torch.inf).logsumexp(1)
        mean_score = (score * x.wanted).sum(1) / x.count.clamp(min=1)
        return torch.where(x.count > 0, log_total - mean_score, 0.0).mean()

    # --- Writing

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        longest = super().check(prompts, settings)
        if settings.order in ("certainty", "margin"):
            if settings.joint:
                raise InsertlmError(f"decode.joint: expected false with decode.order {settings.order}, got true")
            if settings.position_top_k != 1:
                raise InsertlmError(
                    f"decode.position_top_k: expected 1 with decode.order {settings.order}, which takes the best slot, "
                    f"got {settings.position_top_k}"
                )
        return longest

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return _Writing(self, prompts, settings, longest)

    @torch.inference_mode()
    def score(self, prefix: Sequence[int], text: Sequence[int], batch_size: int = 64) -> Score:
        variants, first_slot = with_each_left_out(prefix, text), len(prefix) + 1
        longest = self.check(variants[:1], DecodeConfig())
        stops, slots, tokens = list[float](), list[float](), [0.0] * len(text)
        for first in range(0, len(variants), batch_size):
            batch = variants[first : first + batch_size]
            left_out = [(row, first - 1 + row) for row in range(len(batch)) if first + row > 0]
            pairs = [(row, k, first_slot + gap) for row, k in left_out for gap in restoring_gaps(text, k)]
            with exclusively(self.device):
                writing = _Writing(self, batch, DecodeConfig(), longest)
                writing.stay_open()
                stop, masses, found = writing.appraise([(row, cell, text[k]) for row, k, cell in pairs])
            stops += stop.tolist()
            slots = slots or masses[0, first_slot : first_slot + len(text) + 1].exp().tolist()
            for (_, k, _), probability in zip(pairs, found.exp().tolist(), strict=True):
                tokens[k] += probability
        return Score(list(text), stops[0], slots, tokens, stops[1:])


class _Writing(InsertionWriter):
    """An ILM at work."""

    family: ILM
    mixes = True

    @cached_property
    def words(self) -> Tensor:
        """What may be written, as rows of the unembedding: [W, d]. Taken out once, at the first step."""
        return self.family.unembedding.weight[self.family.writable]

    @property
    def policy(self) -> policies.Policy:
        """The likeliest pair is the likeliest token in the slot that has it: only sampling needs all pairs at once."""
        if self.settings.joint and (self.settings.temperature == 0.0 or self.settings.top_k == 1):
            return policies.best_pair
        return _POLICIES.get(self.settings.order, policies.mass)

    def step(self, number: int) -> Step:
        """The stop probability and the next insertion of every text."""
        hidden, where, stop = self._read()
        scope = self.scope(stop >= self.threshold(stop))
        slot_rows = hidden.index_select(0, scope.slots.pack(where))
        sampled = self.settings.joint and self.policy is not policies.best_pair
        insert = self._insert_jointly if sampled else self._insert_in_two_steps
        slot, token, log_probability = (part[:, None] for part in insert(number, scope, slot_rows))
        full = scope.full if scope.barred is None else scope.full | ~log_probability.isfinite().squeeze(1)
        return Step(scope.complete, full, stop, slot, self.family.writable[token], log_probability)

    def appraise(self, pairs: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """What the model thinks of the texts as they stand. pairs: N of a row, a cell in it and an id
        Returns the stop probabilities, [B], the log-probabilities of cells as slots, [B, C], and of an insertion of
        that id behind that cell, [N]."""
        hidden, where, stop = self._read()
        slots = Packing(self.canvas.slots, counts=self.canvas.counts.open)
        slot_rows = hidden.index_select(0, slots.pack(where))
        masses = spread(policies.look(slot_rows, self.words, policies.mass)[0], slots)
        total = masses.logsumexp(1)
        row, cell, token = torch.tensor(pairs, device=total.device).long().view(-1, 3).unbind(1)
        logit = (slot_rows[slots.where[row, cell]] * self.family.unembedding.weight[token]).sum(-1)
        logit = logit.masked_fill(~torch.isin(token, self.family.writable), -torch.inf)
        return stop, masses - total[:, None], logit - total[row]

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows and their places, see `hidden`, and the stop probabilities, [B]"""
        hidden, where = self.hidden()
        stop_row = where.gather(1, self.canvas.prefix[:, None]).squeeze(1)
        return hidden, where, self.family.stop(hidden.index_select(0, stop_row)).softmax(-1)[:, 0]

    def _insert_in_two_steps(self, number: int, scope: Scope, slot_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A slot, then a token in it."""
        masses, scores = policies.look(slot_rows, self.words, self.policy, scope.barred)
        mass, score = spread(masses, scope.slots), spread(scores, scope.slots)
        if self.policy in (policies.certainty, policies.margin):
            score = score.masked_fill(~policies.plausible(mass), -torch.inf)
        in_play = 1 if self.settings.joint else self.settings.position_top_k
        slot = choose(score, draws(_SLOT, self.seed, self.own(number)), k=in_play)
        row = scope.slots.where.gather(1, slot[:, None]).squeeze(1).clamp(min=0)  # slot 0 where all is barred
        logits = scope.logits(slot_rows.index_select(0, row), self.words, row)
        token = self._choose(logits, number)
        logit = logits.gather(1, token[:, None]).squeeze(1)
        return slot, token, logit - mass.logsumexp(1)

    def _insert_jointly(self, number: int, scope: Scope, slot_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A pair from the joint distribution. Holds the logits of all slots of the batch, unlike two-step sampling."""
        logits = spread(scope.logits(slot_rows, self.words), scope.slots).flatten(1)
        pair = self._choose(logits, number)
        log_probability = logits.gather(1, pair[:, None]).squeeze(1) - logits.logsumexp(1)
        return pair // len(self.words), pair % len(self.words), log_probability

    def _choose(self, logits: Tensor, number: int) -> Tensor:
        return self.choose(logits, draws(_TOKEN, self.seed, self.own(number)))
