"""What is lost of many conversations without being an error, counted and logged once."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.chat.messages import Script

__all__ = ["TurnReport"]

_log = logging.getLogger("penstock")


@dataclass
class TurnReport:
    """Counts turns that are not trained on, or not to their end; may be filled from threads."""

    template: str
    marks_generation: bool
    """Whether the template has `{% generation %}` blocks."""
    num_conversations: int = 0
    unthought: int = 0
    """Turns that are not trained on because the template leaves out their thought."""
    unended: int = 0
    """Turns of which no token at their end is trained on."""
    _affected: dict[str, int] = field(default_factory=lambda: {"unthought": 0, "unended": 0})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, scripts: Iterable[Script], *, ended: bool = False) -> None:
        """Count some conversations.

        Args:
            scripts: The conversations.
            ended: Whether an end token is put behind each, and trained on if it ends a turn.
        """
        with self._lock:
            for script in scripts:
                unended = len(script.unended)
                if ended and script.unended and not script.text[script.unended[-1] :].strip():
                    unended -= 1
                self.num_conversations += 1
                self.unthought += script.unthought
                self.unended += unended
                self._affected["unthought"] += script.unthought > 0
                self._affected["unended"] += unended > 0

    def log(self) -> bool:
        """Log a warning for each kind of loss; returns whether there was any."""
        if self.unthought:
            _log.warning(
                "%s not trained on: the template %s leaves out their reasoning_content, so the "
                'model never said what is left. rewritten="train" (--rewritten train) trains on '
                "what is left.",
                self._counted("unthought"),
                self.template,
            )
        if self.unended and self.marks_generation:
            _log.warning(
                "%s not trained on to the end: the {%% generation %%} blocks of the template %s "
                "leave out the token that ends a turn, so a model does not learn to stop. Write it "
                "inside the block.",
                self._counted("unended"),
                self.template,
            )
        elif self.unended:
            _log.warning(
                "%s not trained on to the end: the template %s writes no token there that also "
                "ends a last turn, so a model does not learn to stop there. Use a template that "
                "ends each turn with a token.",
                self._counted("unended"),
                self.template,
            )
        return bool(self.unthought or self.unended)

    def _counted(self, kind: str) -> str:
        turns, affected = getattr(self, kind), self._affected[kind]
        verb = "turn is" if turns == 1 else "turns are"
        return f"In {affected:,} of {self.num_conversations:,} conversations {turns:,} {verb}"
