"""What a family can do when it writes, in one record that the rest of the library reads."""

from __future__ import annotations

from dataclasses import dataclass

from insertlm.core.errors import InsertlmError
from insertlm.inference.settings import DecodeConfig

__all__ = ["Abilities"]


@dataclass(frozen=True)
class Abilities:
    """The decode settings and prompts that a family supports."""

    orders: tuple[str, ...] = ()  # values of decode.order that it knows beside auto
    parallel: bool = False  # decode.parallel: it can write several tokens in one step
    confidence: bool = False  # decode.confidence: beside the best place, only those of likely tokens get one
    draws_places: bool = False  # decode.joint and decode.position_top_k: it can sample where to write
    stop_threshold: bool = False  # decode.stop_threshold
    supports_constraints: bool = False  # bounds on the length of gaps, banned and required tokens
    schedules_steps: bool = False  # decode.max_steps is the length of its schedule, so that it changes what is written
    decides_length: bool = True  # it decides how many tokens a gap needs, and so can continue a text
    takes_hints: bool = False  # it has learnt what "about N words" means for a blank
    appends: bool = False  # it writes at the end of the text only
    weighs_texts: bool = False  # decode.best_of: likelihoods of texts and of fills are exact, and cost one pass
    left_to_right: bool = False  # within a blank it writes from left to right, so a token is final once it is written

    def check(self, settings: DecodeConfig) -> None:
        """Refuse settings that would have no effect, because a user who gives one expects that it has."""
        if settings.order not in (known := ("auto", *self.orders)):
            raise InsertlmError(f"decode.order: expected {' or '.join(known)}, got {settings.order}")
        if settings.parallel != 1 and not self.parallel:
            raise InsertlmError(f"decode.parallel: this family writes one token a step, got {settings.parallel}")
        if settings.best_of != 1 and not self.weighs_texts:
            raise InsertlmError(
                f"decode.best_of: this family has no exact likelihoods to choose by; expected 1, got {settings.best_of}"
            )
        if settings.confidence and not self.confidence:
            raise InsertlmError(
                f"decode.confidence: this family has no use for it; expected 0, got {settings.confidence}"
            )
        if settings.confidence and settings.parallel == 1:
            raise InsertlmError(
                f"decode.confidence: expected 0 with one token a step (decode.parallel 1), got {settings.confidence}"
            )
        if settings.joint and not self.draws_places:
            raise InsertlmError("decode.joint: this family has no distribution over pairs; expected false, got true")
        if settings.position_top_k != 1 and not self.draws_places:
            raise InsertlmError(
                f"decode.position_top_k: this family draws no places; expected 1, got {settings.position_top_k}"
            )
        if settings.stop_threshold != (usual := DecodeConfig().stop_threshold) and not self.stop_threshold:
            raise InsertlmError(
                f"decode.stop_threshold: this family ends without one; expected {usual}, got {settings.stop_threshold}"
            )
