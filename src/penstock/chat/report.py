"""What is lost of many conversations without being an error, counted and logged once."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.chat.messages import ChatText

__all__ = ["TurnReport"]

_log = logging.getLogger("penstock")


@dataclass
class TurnReport:
    """Counts turns that are not trained on, or not to their end; may be filled from threads."""

    template: str
    marks_generation: bool
    """Whether the template has `{% generation %}` blocks."""
    num_conversations: int = 0
    num_without_reasoning: int = 0
    """Turns that are not trained on because the template leaves out their thought."""
    without_end: int = 0
    """Turns of which no token at their end is trained on."""
    _affected: dict[str, int] = field(
        default_factory=lambda: {"num_without_reasoning": 0, "without_end": 0}
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, scripts: Iterable[ChatText], *, ended: bool = False) -> None:
        """Count some conversations.

        Args:
            scripts: The conversations.
            ended: Whether an end token is put behind each, and trained on if it ends a turn.
        """
        with self._lock:
            for script in scripts:
                without_end = len(script.without_end)
                if (
                    ended
                    and script.without_end
                    and not script.text[script.without_end[-1] :].strip()
                ):
                    without_end -= 1
                self.num_conversations += 1
                self.num_without_reasoning += script.num_without_reasoning
                self.without_end += without_end
                self._affected["num_without_reasoning"] += script.num_without_reasoning > 0
                self._affected["without_end"] += without_end > 0

    def log(self) -> bool:
        """Log a warning for each kind of loss; returns whether there was any."""
        if self.num_without_reasoning:
            _log.warning(
                "%s not trained on: the template %s leaves out their reasoning_content, so the "
                'model never said what is left. rewritten="train" (--rewritten train) trains on '
                "what is left.",
                self._counted("num_without_reasoning"),
                self.template,
            )
        if self.without_end and self.marks_generation:
            _log.warning(
                "%s not trained on to the end: the {%% generation %%} blocks of the template %s "
                "leave out the token that ends a turn, so a model does not learn to stop. Write it "
                "inside the block.",
                self._counted("without_end"),
                self.template,
            )
        elif self.without_end:
            _log.warning(
                "%s not trained on to the end: the template %s writes no token there that also "
                "ends a last turn, so a model does not learn to stop there. Use a template that "
                "ends each turn with a token.",
                self._counted("without_end"),
                self.template,
            )
        return bool(self.num_without_reasoning or self.without_end)

    def _counted(self, kind: str) -> str:
        turns, affected = getattr(self, kind), self._affected[kind]
        verb = "turn is" if turns == 1 else "turns are"
        return f"In {affected:,} of {self.num_conversations:,} conversations {turns:,} {verb}"
