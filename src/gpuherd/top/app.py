"""The full-screen view: its layout, its keys, and its two dialogs.

It looks once a second in a thread, draws the result (both in ``look``), and sends requests to the run
(``gpuherd.jobs.control.client``), never touching a job itself. Leaving it changes nothing.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from gpuherd.errors import GpuherdError, clean
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.job import ENDED
from gpuherd.jobs.records import JobStatus
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.top import look as view
from gpuherd.top.look import Cells, GpuHistory, Looker, Snapshot, Widths

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

Dots stand for figures that the driver does not give."""


class Dialog(ModalScreen[bool]):
    """A box over the screen that a key closes."""

    DEFAULT_CSS = """
    Dialog { align: center middle; }
    Dialog Vertical { width: 74; max-width: 100%; height: auto; padding: 1 2; }
    Dialog Vertical { border: round $accent; background: $surface; }
    """

    def __init__(self, *texts: Text):
        super().__init__()
        self._texts = texts

    def compose(self) -> ComposeResult:
        with Vertical():
            yield from map(Static, self._texts)


class ConfirmDialog(Dialog):
    """Asks whether to do something; ``y`` does it, ``n`` and escape don't."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str):
        super().__init__(Text(question), Text.assemble("\n", ("y", "bold"), " yes    ", ("n", "bold"), " no"))


class Keys(Dialog):
    """The list of keys; any key closes it."""

    def __init__(self) -> None:
        super().__init__(Text.assemble(("Keys\n\n", "bold"), KEYS))

    def on_key(self, event: Key) -> None:
        """Closes it, and does nothing else."""
        event.stop()
        self.dismiss(False)


EVERY_S = 1.0
_PARTS = 3
_COLUMNS = ("State", "Job", "GPU", "What")
Severity = Literal["information", "warning", "error"]


class TopApp(App[None]):
    """The view of one run. ``every_s``: seconds between two looks."""

    TITLE = "gpuherd top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head { height: 2; padding: 0 1; background: $boost; }
    #gpus { height: auto; max-height: 40%; padding: 0 1; scrollbar-size-vertical: 1; }
    #gpus Static { height: auto; }
    #jobs { height: 1fr; min-height: 4; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #filter-line { display: none; height: 1; background: $boost; }
    #filter-line.open { display: block; }
    #filter-title { width: auto; padding: 0 1; text-style: bold; }
    #filter { width: 1fr; height: 1; border: none; }
    #log-title { height: 1; padding: 0 1; background: $boost; }
    #log { height: 25%; min-height: 3; padding: 0 1; scrollbar-size-vertical: 1; }
    .maximized-log #gpus, .maximized-log #jobs { display: none; }
    .maximized-log #log { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel_job", "Cancel"),
        Binding("r", "retry_job", "Retry"),
        Binding("p", "pause_job", "Pause"),
        Binding("d", "drain", "Drain"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("l", "maximize_log", "Log"),
        Binding("question_mark", "keys", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
        Binding("escape", "close", show=False),
    ]

    def __init__(self, run: RunDirectory, *, every_s: float = EVERY_S):
        super().__init__()
        self._run_folder = run
        self._every_s = every_s
        self._looker = Looker(run)
        self._history = GpuHistory()
        self._filter = ""
        # The job whose log is shown; ``_follows``: the user has chosen it, so that the cursor follows it.
        self._chosen: str | None = None
        self._follows = False
        self._log_of: str | None = None
        self.seen: Snapshot | None = None
        self._widths: Widths | None = None
        self._drawn: dict[str, Cells] = {}

    # --- the screen -------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with VerticalScroll(id="gpus", can_focus=False):
            yield Static(id="gpu-lines")
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=False)
        with Horizontal(id="filter-line"):
            yield Static("Only jobs named …", id="filter-title")
            yield Input(id="filter", placeholder="text in the name; enter keeps it, escape shows all", compact=True)
        yield Static(id="log-title")
        with VerticalScroll(id="log", can_focus=False):
            yield Static(id="log-lines")
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look."""
        self.query_one("#jobs", DataTable).focus()
        self.look_now()
        self.set_interval(self._every_s, self.look_now)

    def on_resize(self) -> None:
        """Draws the last look again, in the new size."""
        if self.seen is not None:
            self._draw(self.seen)

    @work(thread=True, exclusive=True, group="look", exit_on_error=True)
    def look_now(self) -> None:
        """Looks, in a thread, and has the result drawn."""
        look = self._looker.look(self._filter, self._chosen)
        self.call_from_thread(self._saw, look)

    def _saw(self, look: Snapshot) -> None:
        if not self.is_running or len(self.query("#head, #jobs, #log-lines")) < _PARTS:
            return  # the user has left meanwhile, and the screen is being removed
        self.seen = look
        self._history.add(look.machine.gpus)
        self._draw(look)

    def _draw(self, look: Snapshot) -> None:
        width = self.size.width - 2
        self.query_one("#head", Static).update(view.head(look, str(self._run_folder.root), width))
        lines = view.gpu_lines(look, self._history, width - 1)
        self.query_one("#gpu-lines", Static).update(Text("\n").join(lines))
        self._draw_jobs(look)
        self._draw_log(look)

    def _draw_log(self, look: Snapshot) -> None:
        """The log, at its end unless the user has gone back in it."""
        scroll = self.query_one("#log", VerticalScroll)
        at_end = scroll.scroll_offset.y >= scroll.max_scroll_y
        self.query_one("#log-title", Static).update(view.log_title(look))
        self.query_one("#log-lines", Static).update(view.log_text(look))
        if at_end or look.log_of != self._log_of:
            self.call_after_refresh(scroll.scroll_end, animate=False)
        self._log_of = look.log_of

    def _draw_jobs(self, look: Snapshot) -> None:
        """Updates the changed cells of the table, so that the chosen job and the scroll position stay."""
        table = self.query_one("#jobs", DataTable)
        jobs = () if look.status is None else look.status.jobs
        widths = view.job_widths(jobs, self.size.width - 1)
        wanted = {job.name: view.job_cells(job, widths) for job in jobs}
        if list(wanted) != list(self._drawn) or widths != self._widths:
            self._fill(table, wanted, widths)
        else:
            for name, cells in wanted.items():
                for column, cell, old in zip(_COLUMNS, cells, self._drawn[name], strict=True):
                    if cell != old:
                        table.update_cell(name, column, cell)
        self._drawn = wanted

    def _fill(self, table: DataTable[Text], wanted: dict[str, Cells], widths: Widths) -> None:
        chosen, top = self._chosen, table.scroll_offset.y
        row = table.cursor_row
        with self.prevent(DataTable.RowHighlighted):
            table.clear(columns=True)
            for title, width in zip(_COLUMNS, widths, strict=True):
                table.add_column(title, key=title, width=width)
            for name, cells in wanted.items():
                table.add_row(*cells, key=name)
            names = list(wanted)
            if self._follows and chosen in wanted:
                row = names.index(chosen)
            table.move_cursor(row=min(row, max(0, len(names) - 1)), animate=False)
            table.scroll_to(y=top, animate=False, immediate=True)
        self._chosen = names[table.cursor_row] if names else None
        self._widths = widths

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another job is chosen: its log is shown."""
        name = event.row_key.value
        if name is not None and name != self._chosen:
            self._chosen, self._follows = name, True
            self.look_now()

    def on_data_table_row_selected(self) -> None:
        """Enter on a job."""
        self.action_maximize_log()

    # --- keys -------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Chooses the next job, or the one before."""
        table = self.query_one("#jobs", DataTable)
        table.move_cursor(row=max(0, min(table.row_count - 1, table.cursor_row + by)))

    def action_maximize_log(self) -> None:
        """The log on the whole screen, and back."""
        self.screen.toggle_class("maximized-log")
        if self.screen.has_class("maximized-log"):
            self.query_one("#log", VerticalScroll).scroll_end(animate=False)

    def action_keys(self) -> None:
        """The list of keys."""
        self.push_screen(Keys())

    def action_filter(self) -> None:
        """Opens the line for the filter."""
        self.query_one("#filter-line").add_class("open")
        self.query_one("#filter", Input).focus()

    def action_close(self) -> None:
        """Closes what is open, the filter last."""
        line = self.query_one("#filter-line")
        if self.screen.has_class("maximized-log"):
            self.screen.remove_class("maximized-log")
        elif line.has_class("open"):
            self.query_one("#filter", Input).value = ""
            line.remove_class("open")
        self.query_one("#jobs", DataTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """The filter works while it is typed."""
        self._filter = event.value.strip()
        self.look_now()

    def on_input_submitted(self) -> None:
        """Enter keeps the filter and goes back to the jobs."""
        self.query_one("#filter-line").set_class(bool(self.query_one("#filter", Input).value.strip()), "open")
        self.query_one("#jobs", DataTable).focus()

    # --- requests ---------------------------------------------------------------------------------------------

    def _job(self) -> JobStatus | None:
        return None if self.seen is None else self.seen.job(self._chosen)

    def action_cancel_job(self) -> None:
        """Asks first: what was done so far is lost."""
        job = self._job()
        if job is not None and job.state in ENDED:
            self._answered(f"{clean(job.title)} is {job.state} already", "warning")
        elif job is not None:
            question = f"Cancel {clean(job.title)}? It ends for good, and with it all jobs that need it."
            self._ask_first(question, Request(ControlKind.CANCEL, (job.name,)))

    def _ask_first(self, question: str, request: Request) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._send(request)

        self.push_screen(ConfirmDialog(question), answered)

    def action_retry_job(self) -> None:
        """Lets the job wait again."""
        job = self._job()
        if job is not None:
            self._send(Request(ControlKind.RETRY, (job.name,)))

    def action_pause_job(self) -> None:
        """Pauses the job, or lets it go on."""
        job = self._job()
        if job is not None:
            self._send(Request(ControlKind.RESUME if job.paused else ControlKind.PAUSE, (job.name,)))

    def action_drain(self) -> None:
        """Asks first: it ends the dispatcher."""
        question = "Drain? Nothing new is started, and gpuherd ends when the running jobs have ended."
        self._ask_first(question, Request(ControlKind.DRAIN))

    @work(thread=True, group="requests")
    def _send(self, request: Request) -> None:
        """Sends a request, in a thread: the response may take seconds."""
        severity: Severity = "information"
        try:
            response = send(self._run_folder, request)
            text, severity = response.text, "information" if response.ok else "warning"
        except GpuherdError as problem:
            text, severity = str(problem), "error"
        self.call_from_thread(self._answered, text, severity)

    def _answered(self, text: str, severity: Severity) -> None:
        if not self.is_running:
            return
        self.notify(clean(text), severity=severity, markup=False, timeout=6)
        self.look_now()
