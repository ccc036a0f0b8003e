"""The two windows that come up over the view: a question before something that can't be taken back, and the keys."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = """\
up, down, j, k   choose a job; its log is shown below
enter, l         the log on the whole screen, and back
c                cancel the job: it ends for good
r                retry it, after it failed or was cancelled
p                pause it, or let it go on
d                drain: start nothing new, end with what runs
/                show only jobs with some text in their name
escape           close what is open; show all jobs again
?                this list
q                leave; the run goes on without you

Dots stand for figures that the driver does not tell."""


class Question(ModalScreen[bool]):
    """Asks whether to do something; ``y`` does it, ``n`` and escape don't."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]
    DEFAULT_CSS = """
    Question { align: center middle; }
    Question Vertical { width: 60; height: auto; padding: 1 2; border: round $warning; background: $surface; }
    """

    def __init__(self, question: str):
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._question))
            yield Static(Text.assemble("\n", ("y", "bold"), " yes    ", ("n", "bold"), " no"))

    def action_answer(self, yes: bool) -> None:
        """Closes with the answer."""
        self.dismiss(yes)


class Keys(ModalScreen[None]):
    """The list of keys; any key closes it."""

    DEFAULT_CSS = """
    Keys { align: center middle; }
    Keys Vertical { width: 74; max-width: 100%; height: auto; padding: 1 2; }
    Keys Vertical { border: round $accent; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text.assemble(("Keys\n\n", "bold"), KEYS))

    def on_key(self, event: Key) -> None:
        """Closes it, and does nothing else."""
        event.stop()
        self.dismiss(None)
