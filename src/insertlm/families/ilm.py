"""The Insertion Language Model: the method of the paper, whole, in one file.

Design choices, the published ones unless said:
- A row reads `<stop> prefix <bos> text`; there is no end token.
- Corruption: n uniform on {0 … L}, n of the L target tokens are deleted and the survivors closed up. n = 0 teaches the
  model to stop. (The recipe knows other corruptions, which are not the paper's: see the folder corruption/.)
- One softmax over slots × vocabulary; slot k means "right behind the k-th visible token". The target is the empirical
  distribution of the deleted tokens over their slots. All visible tokens but <stop> are slots in training, those of the
  prefix too; in decoding only <bos> and what follows it.
- The stop classifier is a small residual network on <stop>'s hidden row; class 0 means complete. (The published one has
  dropout inside.)
- Not the paper's: in place of one stop classifier for the text, `stop: slots` asks every slot. The same head reads the
  slot's own hidden row and says whether something is missing right there: a gate. It learns from all slots of what the
  corruption has opened (the whole text, unless the text has blanks), so it is calibrated for the slots that are asked
  in writing. A slot is open while its gate says that something is missing; a blank is full when all its slots are
  closed, and a text is complete when all its blanks are full. Nothing is written into closed slots.
- At temperature 0 a gate closes at `decode.stop_threshold`. Else ends are drawn: each slot closes with the probability
  that its gate gives it. The draw belongs to the pair of tokens that the slot lies between, so it stays the same until
  something is inserted there; drawn anew in every step, a slot would be open sooner or later. Slots are drawn
  independently of each other, which is not quite right where a missing word could be in either of two, as between equal
  words: there a threshold above one half is better, see it.py.
- Decoding asks the stop classifier first, then chooses a slot by its mass and a token in it. Special tokens take no
  part, not in the slot's mass either. What a prompt demands, see inference/constraints.py, limits slots and words, and
  can overrule the stop classifier. (`decode.order` offers other ways to choose a slot, see inference/policies.py.)
- Not the paper's either: several tokens a step. `decode.parallel` 0 writes one into every open blank, n into the n best
  slots. Only slots count in which something is missing, by their gates or else by their mass, and beside the best one
  only those whose likeliest token reaches `decode.confidence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import uniform
from insertlm.core.packing import Packing
from insertlm.core.section import Count, Fraction, NonNegative
from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, FamilyConfig, Losses, Noise, Rows
from insertlm.families.corruption.base import Corruption
from insertlm.families.corruption.choice import check_choice, choose_corruption
from insertlm.families.corruption.leftmost import Leftmost
from insertlm.families.corruption.packed import Corrupted, corrupt, packed_length
from insertlm.families.corruption.slots import slots_of
from insertlm.families.insertion import InsertionWriter, spread
from insertlm.inference import policies
from insertlm.inference.engine import exclusively
from insertlm.inference.sampling import choose, draws
from insertlm.inference.scope import Scope
from insertlm.inference.score import Score, restoring_gaps, with_each_left_out
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import Step, Writer
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples, Task
from insertlm.text.tokenizers import Tokenizer
from insertlm.text.units import token_traits

__all__ = [
    "ILM",
    "_POLICIES",
    "IlmConfig",
    "IlmWriter",
    "Inserting",
    "StopHead",
    "check_places",
    "gate_losses",
    "token_losses",
]

_SLOT, _TOKEN, _GATE = 0, 1, 2  # streams of noise in decoding
_POLICIES: dict[str, policies.Policy] = {
    "mass": policies.mass,
    "certainty": policies.certainty,
    "margin": policies.margin,
}


NO_TRAITS = torch.zeros(0, dtype=torch.uint8)


class IlmConfig(FamilyConfig, frozen=True, kw_only=True, tag="ilm"):
    """The `family` section of a recipe for an ILM."""

    stop_weight: NonNegative = 1.0  # of the stop loss beside that of the tokens
    # What is not the paper's.
    stop: Literal["text", "slots"] = "text"  # who says that nothing is missing: one classifier, or a gate in every slot
    targets: Literal["any", "first"] = "any"  # which missing tokens of a slot are asked for: all, or the leftmost
    blanks: Fraction = 0.0  # share of the examples that have blanks, partly filled in, and are complete elsewhere
    stretch: Fraction = 0.0  # share of the examples in which only tokens of one stretch are deleted
    group: Count = 1  # tokens that belong together, of which the last has to be deduced, as in zebra puzzles
    frame: Fraction = 0.1  # with groups: share of the examples in which the other tokens are still being written
    solver: Fraction = 0.0  # share of the corruptions that leave what a solver has found so far
    deletions: Count = 1  # corruptions of each example in a step; more than one need model.prefix_lm

    def __post_init__(self) -> None:
        check_choice(self.blanks, self.stretch, self.group, self.solver, self.targets == "first")

    def corruption(self, traits: Tensor = NO_TRAITS) -> Corruption:
        """traits: see PartlyFilled"""
        chosen = choose_corruption(self.blanks, self.stretch, self.group, self.frame, self.solver, traits)
        return Leftmost(chosen) if self.targets == "first" else chosen

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> ILM:
        if self.deletions > 1 and not model.prefix_lm:
            raise InsertlmError(f"family.deletions: expected 1 unless model.prefix_lm is true, got {self.deletions}")
        return ILM(self, model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        return prefix + target + ILM.framing

    def check_task(self, task: Task) -> None:
        if self.solver and not task.has_solving_order:
            raise ValueError(f"family.solver is {self.solver}; expected 0 for a task without a solver")


# --- Model ------------------------------------------------------------------------------------------------------------


class StopHead(nn.Module):
    """Two logits, complete and incomplete: of a text from <stop>'s hidden row, of a slot from its own."""

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


class Inserting(Family):
    """A family that has what writing like an ILM takes."""

    unembedding: nn.Linear
    stop: StopHead
    gated: bool  # whether `stop` is asked about every slot


class ILM(Inserting):
    abilities = Abilities(
        orders=tuple(_POLICIES),
        parallel=True,
        confidence=True,
        draws_places=True,
        stop_threshold=True,
        supports_constraints=True,
    )
    traits: Tensor

    def __init__(self, config: IlmConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        self.config = config
        self.unembedding = self.backbone.unembedding()
        self.stop = StopHead(model.width)
        self.gated = config.stop == "slots"
        traits = torch.from_numpy(token_traits(tokenizer)) if config.blanks else NO_TRAITS
        self.register_buffer("traits", traits, persistent=False)
        # Two, because the thread that asks for lengths must not touch the device.
        self.corruption = self.corruption_on_host = config.corruption(traits)

    # --- Learning

    def _apply(self, *arguments: Any, **more: Any) -> ILM:
        """Moves weights and buffers. A corruption is made here and not in a step, which is compiled."""
        super()._apply(*arguments, **more)  # type: ignore[no-untyped-call]
        self.corruption = self.config.corruption(self.traits)
        return self

    def rows(self, examples: Examples) -> Rows:
        return Rows.of(examples, self.specials.stop, self.specials.bos, solving_order=self.config.solver > 0)

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        return packed_length(rows, noise, self.corruption_on_host, self.config.deletions)

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """The loss of token insertion and that of stopping, each a plain mean over corrupted texts."""
        x = corrupt(rows, noise, capacity, self.corruption, self.config.deletions)
        keys = x.dropout if self.training else None
        hidden = self.backbone(x.tokens, x.positions, x.attention(self.model.prefix_lm), keys=keys)
        mass, score = slot_scores(hidden, self.unembedding.weight, x.slots.flatten(), x.target.flatten())
        # Sums over thousands of slots, and a loss that ends near zero, need float32.
        with torch.autocast(hidden.device.type, enabled=False):
            token_loss = token_losses(mass, score.view_as(x.target), x).mean()
            stop_loss = gate_losses(self.stop, hidden, x, capacity).mean() if self.gated else self._stop_loss(hidden, x)
        total = token_loss + self.config.stop_weight * stop_loss
        return Losses(total, {"token_loss": token_loss.detach(), "stop_loss": stop_loss.detach()})

    def _stop_loss(self, hidden: Tensor, x: Corrupted) -> Tensor:
        return F.cross_entropy(self.stop(hidden.index_select(0, x.stop)), (x.count > 0).long())

    # --- Writing

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        longest = super().check(prompts, settings)
        check_places(settings)
        return longest

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return IlmWriter(self, prompts, settings, longest)

    @torch.inference_mode()
    def score(self, prefix: Sequence[int], text: Sequence[int], batch_size: int = 64) -> Score:
        # Checked before there are as many variants as tokens: of a long text they do not fit into memory.
        longest = self.check([Prompt(list(prefix), start=list(text))], DecodeConfig())
        variants, first_slot = with_each_left_out(prefix, text), len(prefix) + 1
        stops, slots, tokens = list[float](), list[float](), [0.0] * len(text)
        for first in range(0, len(variants), batch_size):
            batch = variants[first : first + batch_size]
            left_out = [(row, first - 1 + row) for row in range(len(batch)) if first + row > 0]
            pairs = [(row, k, first_slot + gap) for row, k in left_out for gap in restoring_gaps(text, k)]
            with exclusively(self.device):
                writing = IlmWriter(self, batch, DecodeConfig(), longest)
                writing.stay_open()
                stop, masses, found = writing.appraise([(row, cell, text[k]) for row, k, cell in pairs])
            stops += stop.tolist()
            slots = slots or masses[0, first_slot : first_slot + len(text) + 1].exp().tolist()
            for (_, k, _), probability in zip(pairs, found.exp().tolist(), strict=True):
                tokens[k] += probability
        return Score(list(text), stops[0], slots, tokens, stops[1:])


def token_losses(mass: Tensor, score: Tensor, x: Corrupted) -> Tensor:
    """Cross-entropy with the empirical distribution of the wanted tokens of each text, [N]; 0 where none is missing.

    That is log Σ exp over all slots and words, minus the mean logit of the wanted tokens in their slots.
    mass: [T] log-sum-exp of each row's logits   score: [N, L] logit of every target token in its slot
    """
    where, is_slot = (x.by_text(part) for part in (x.packing.where, x.packing.keep))
    slots = mass.gather(0, where.clamp(min=0).flatten()).view_as(where)
    log_total = slots.masked_fill(~is_slot, -torch.inf).logsumexp(1)
    mean_score = (score * x.wanted).sum(1) / x.count.clamp(min=1)
    return torch.where(x.count > 0, log_total - mean_score, 0.0)


def gate_losses(gate: StopHead, hidden: Tensor, x: Corrupted, capacity: int | None) -> Tensor:
    """Of each text the mean over the slots in which something may be missing, [N]: a text has hundreds of slots outside
    of its blanks, which would drown the few that writing asks."""
    slots = slots_of(x, capacity)
    logits = gate(hidden.index_select(0, slots.rows))
    surprise = F.cross_entropy(logits, (slots.missing > 0).long(), reduction="none")
    asked = slots.packing.keep & x.open
    each = surprise.index_select(0, slots.packing.where.flatten()).view_as(asked)
    return (each * asked).sum(1) / asked.sum(1)


def check_places(settings: DecodeConfig) -> None:
    """Refuse settings that contradict each other about where to write."""
    if settings.order in ("certainty", "margin"):
        if settings.joint:
            raise InsertlmError(f"decode.joint: expected false with decode.order {settings.order}, got true")
        if settings.position_top_k != 1:
            raise InsertlmError(
                f"decode.position_top_k: expected 1 with decode.order {settings.order}, which takes the best slot, "
                f"got {settings.position_top_k}"
            )
    if settings.parallel != 1 and (settings.joint or settings.position_top_k != 1):
        raise InsertlmError(
            "decode.parallel: expected 1 where places are drawn (decode.joint, decode.position_top_k), "
            f"got {settings.parallel}"
        )


class IlmWriter(InsertionWriter):
    """An ILM at work."""

    family: Inserting
    mixes = True

    @cached_property
    def words(self) -> Tensor:
        """The unembedding of what may be written, [W, d]. Copied once, at the first step."""
        return self.family.unembedding.weight[self.family.writable]

    @property
    def policy(self) -> policies.Policy:
        """With greedy decoding the likeliest pair of slot and token is found slot by slot; only sampling a pair needs
        the logits of all pairs at once."""
        if self.settings.joint and (self.settings.temperature == 0.0 or self.settings.top_k == 1):
            return policies.best_pair
        return _POLICIES.get(self.settings.order, policies.mass)

    def step(self, number: int) -> Step:
        """The stop probability and the next insertions of every text."""
        hidden, where, stop, sure = self._read()
        scope = self._scope(number, stop, sure)
        slot_rows = hidden.index_select(0, scope.slots.pack(where))
        if self.settings.parallel != 1:
            return self._insert_several(number, scope, slot_rows, stop)
        sampled = self.settings.joint and self.policy is not policies.best_pair
        insert = self._insert_jointly if sampled else self._insert_in_two_steps
        slot, token, log_probability = (part[:, None] for part in insert(number, scope, slot_rows))
        full = scope.full if scope.barred is None else scope.full | ~log_probability.isfinite().squeeze(1)
        return Step(scope.complete, full, stop, slot, self.family.writable[token], log_probability)

    def appraise(self, pairs: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """How the model judges the texts as they stand. pairs: N times a row, a cell in it and an id

        Returns the stop probabilities, [B], the log-probability of each cell as a slot, [B, C], and that of inserting
        the id behind the cell of each pair, [N].
        """
        hidden, where, stop, _ = self._read()
        slots = Packing(self.canvas.slots, counts=self.canvas.counts.open)
        slot_rows = hidden.index_select(0, slots.pack(where))
        masses = spread(policies.look(slot_rows, self.words, policies.mass)[0], slots)
        total = masses.logsumexp(1)
        row, cell, token = torch.tensor(pairs, device=total.device).long().view(-1, 3).unbind(1)
        logit = (slot_rows[slots.where[row, cell]] * self.family.unembedding.weight[token]).sum(-1)
        logit = logit.masked_fill(~torch.isin(token, self.family.writable), -torch.inf)
        return stop, masses - total[:, None], logit - total[row]

    def _read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Hidden rows with their places, see `hidden`; the stop probabilities, [B]; and those of all slots, [B, C], if
        these are asked."""
        hidden, where = self.hidden()
        if not self.family.gated:
            stop_row = where.gather(1, self.canvas.prefix[:, None]).squeeze(1)
            return hidden, where, self.family.stop(hidden.index_select(0, stop_row)).softmax(-1)[:, 0], None
        slots, open_ = self.slots, self.canvas.open
        gates = self.family.stop(hidden.index_select(0, slots.pack(where))).log_softmax(-1)[:, 0]
        gates = spread(gates, slots).masked_fill(~open_, 0.0)
        # Nothing is missing if nothing is in any slot. Without an open slot there is nothing to be sure of.
        return hidden, where, gates.sum(1).exp().masked_fill(~open_.any(1), torch.nan), gates.exp()

    def _scope(self, number: int, stop: Tensor, sure: Tensor | None) -> Scope:
        """stop: [B]   sure: [B, C], that nothing is missing in a slot"""
        if sure is None:
            return self.scope(number, stop >= self.threshold(stop))
        open_ = self.canvas.open
        closed = (sure >= self._gate(sure)) & open_
        return self.scope(number, (closed == open_).all(1) & open_.any(1), closed)

    def _gate(self, like: Tensor) -> Tensor:
        """The probability that nothing is missing at which slots close, for a text or each of its slots: [B, C],
        [B, 1] or [1, 1]."""
        threshold = self.threshold(like)
        greedy = [settings.temperature == 0.0 for settings in self.mixed or [self.settings]]
        if not any(greedy):
            return self._drawn
        fixed = threshold[:, None] if isinstance(threshold, Tensor) else like.new_full((1, 1), threshold)
        return (
            fixed if all(greedy) else torch.where(torch.tensor(greedy, device=like.device)[:, None], fixed, self._drawn)
        )

    @property
    def _drawn(self) -> Tensor:
        """A number between 0 and 1 for each slot, by the tokens on both sides of it, [B, C]."""
        return uniform(_GATE, self.seed[:, None], self.canvas.columns, self.canvas.right)

    def _insert_in_two_steps(self, number: int, scope: Scope, slot_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A slot, then a token in it."""
        mass, score = self._look(scope, slot_rows)
        if self.policy in (policies.certainty, policies.margin):
            score = score.masked_fill(~policies.plausible(mass), -torch.inf)
        in_play = 1 if self.settings.joint else self.settings.position_top_k
        slot = choose(score, draws(_SLOT, self.seed, self.own(number)), k=in_play)
        row = scope.slots.where.gather(1, slot[:, None]).squeeze(1).clamp(min=0)  # slot 0 where all is barred
        logits = scope.logits(slot_rows.index_select(0, row), self.words, row)
        token = self._choose(logits, number)
        logit = logits.gather(1, token[:, None]).squeeze(1)
        return slot, token, logit - mass.logsumexp(1)

    def _insert_several(self, number: int, scope: Scope, slot_rows: Tensor, stop: Tensor) -> Step:
        """A token for each of the best slots."""
        mass, score = self._look(scope, slot_rows)
        if not self.family.gated:  # no slot says that it is closed
            score = score.masked_fill(~policies.plausible(mass), -torch.inf)
        most = None
        if self.settings.parallel == 0:
            score = policies.best_of_each(score, self.canvas.gap)
            most = int((score > -torch.inf).sum(1).max())
        slot, real = self.best(score, most)
        row = scope.slots.where.gather(1, slot).clamp(min=0).flatten()

        def logits_of(part: slice) -> Tensor:
            return scope.logits(slot_rows.index_select(0, row[part]), self.words, row[part])

        word, logit, best = self.choose_several(number, slot, logits_of)
        real &= logit > -torch.inf
        real[:, 1:] &= (best - mass.gather(1, slot)).exp()[:, 1:] >= self.settings.confidence
        token = self.family.writable[word]
        real &= ~self.repeats(torch.where(real, slot, -1), token)
        full = scope.full if scope.barred is None else scope.full | ~real.any(1)
        log_probability = logit - mass.logsumexp(1)[:, None]
        return Step(scope.complete, full, stop, torch.where(real, slot, -1), token, log_probability)

    def _look(self, scope: Scope, slot_rows: Tensor) -> tuple[Tensor, Tensor]:
        """The mass and the score of every slot, [B, C] each, −inf where nothing may go."""
        masses, scores = policies.look(slot_rows, self.words, self.policy, scope.barred)
        return scope.among(spread(masses, scope.slots)), scope.among(spread(scores, scope.slots))

    def _insert_jointly(self, number: int, scope: Scope, slot_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A pair from the joint distribution. Unlike two-step sampling, this holds the logits of all slots at once."""
        logits = scope.among(spread(scope.logits(slot_rows, self.words), scope.slots)).flatten(1)
        pair = self._choose(logits, number)
        log_probability = logits.gather(1, pair[:, None]).squeeze(1) - logits.logsumexp(1)
        return pair // len(self.words), pair % len(self.words), log_probability

    def _choose(self, logits: Tensor, number: int) -> Tensor:
        return self.choose(logits, draws(_TOKEN, self.seed, self.own(number)))
