"""A small engine of the tests' own: real processes on this machine, and nothing of ours in it.

It stands for what is outside: a scheduler that takes arrays, keeps their order, gives out places and GPUs, starts
leaders on nodes, and ends them. A process for each batch (``python process_engine.py STATE BATCH``) does that and lives
on when whoever submitted it dies; all it knows lies in a folder of files, so that anybody can ask. A test tells it what
to do by files in that folder: see ``Orders``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EVERY_S = 0.02
NODES = ("n1", "n2")


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


class State:
    """The engine's folder."""

    def __init__(self, root: Path):
        self.root = root
        self.batches = root / "batches"
        self.parcels = root / "parcels"
        self.places = root / "places"
        for folder in (self.batches, self.parcels, self.places):
            folder.mkdir(parents=True, exist_ok=True)

    def parcel(self, handle: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.parcels / handle).read_text())
        return told

    def end(self, handle: str) -> str | None:
        with suppress(OSError):
            return self.parcel(handle).get("end")
        return None

    def knows(self, handle: str) -> bool:
        return (self.parcels / handle).exists() and not (self.root / f"forgotten.{handle}").exists()

    def note(self, handle: str, **values: Any) -> None:
        write(self.parcels / handle, json.dumps(values))

    def order(self, handle: str) -> dict[str, Any] | None:
        with suppress(OSError):
            told: dict[str, Any] = json.loads((self.root / f"order.{handle}").read_text())
            return told
        return None


class Orders:
    """What a test tells the engine."""

    def __init__(self, state: State):
        self.state = state

    def hold(self) -> None:
        """Nothing begins from now on."""
        (self.state.root / "hold").touch()

    def release(self, title: str = "") -> None:
        """What waits may begin, or only what has this title."""
        if title:
            (self.state.root / f"released.{title}").touch()
        else:
            (self.state.root / "hold").unlink()

    def begin_early(self, title: str, *, early: bool = True) -> None:
        """What has this title begins before what it is to come after, as where a controller has lost that."""
        mark = self.state.root / f"early.{title}"
        mark.touch() if early else mark.unlink()

    def away(self) -> None:
        """It does not answer from now on; what runs goes on."""
        (self.state.root / "away").touch()

    def back(self) -> None:
        (self.state.root / "away").unlink()

    def think(self) -> None:
        """It takes its time for an answer on how all stand, until ``speak``."""
        (self.state.root / "thinks").touch()

    @property
    def is_asked(self) -> bool:
        """Whether somebody has waited for such an answer."""
        return (self.state.root / "asked").exists()

    def speak(self) -> None:
        (self.state.root / "thinks").unlink()

    def refuse(self, text: str, *, may_pass: bool, most: int = 0) -> None:
        """It takes no batch of more than ``most``."""
        write(self.state.root / "refuse", json.dumps({"text": text, "may_pass": may_pass, "most": most}))

    def accept(self) -> None:
        (self.state.root / "refuse").unlink()

    def lose_answer(self) -> None:
        """It takes the next batch, and whoever gave it never hears of that."""
        (self.state.root / "lose").touch()

    def swallow(self) -> None:
        """The next batch is lost on its way."""
        (self.state.root / "swallow").touch()

    def forget(self, handle: str) -> None:
        """It knows nothing of this one any more."""
        (self.state.root / f"forgotten.{handle}").touch()

    def end(self, handle: str, how: str, *, by: str | None = None, kill: bool = False) -> None:
        """Ends one in its own right: ``how`` is a word of ``End``. ``kill``: all its processes at once, as a node does
        that is lost."""
        write(self.state.root / f"order.{handle}", json.dumps({"how": how, "by": by, "kill": kill}))

    def handles(self) -> list[str]:
        return sorted(path.name for path in self.state.parcels.iterdir() if not path.name.startswith("."))

    def batches(self) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.state.batches.iterdir() if path.suffix == ".json"]
        return sorted(found, key=lambda batch: batch["at"])


class ProcessEngine:
    """An ``Engine``. ``state`` is its folder; ``gpus`` on each of two nodes."""

    chains = True
    look_s = 0.05

    def __init__(
        self,
        state: Path,
        name: str = "slurm",
        *,
        gpus: int = 4,
        slots: int = 8,
        kill_wait_s: float = 5.0,
        remembers_s: float = 300.0,
    ):
        self.name = name
        self.remembers_s = remembers_s
        self._state = State(state)
        self._gpus = gpus
        self._slots = slots
        self._kill_wait_s = kill_wait_s
        self.looks = 0
        self.cancels = 0

    def _answer(self) -> None:
        from gpuherd.engines.base import EngineAway

        if (self._state.root / "away").exists():
            raise EngineAway("Unable to contact slurm controller (connect failure)")

    def check(self, wanted: Collection[Any]) -> Mapping[Any, str]:
        self._answer()
        return {
            each: f"asks for {each.gpus} GPUs on a node; the largest has {self._gpus}"
            for each in wanted
            if each.gpus > self._gpus
        }

    def submit(self, batch: Any) -> Sequence[str]:
        from gpuherd.engines.base import EngineAway, Refused

        self._answer()
        with suppress(FileNotFoundError):
            refusal = json.loads((self._state.root / "refuse").read_text())
            if len(batch.parcels) > refusal["most"]:
                raise Refused(refusal["text"], may_pass=refusal["may_pass"])
        if (self._state.root / "swallow").exists():
            (self._state.root / "swallow").unlink()
            raise EngineAway("the connection was closed before the request was sent")
        told = {
            "name": batch.name,
            "command": list(batch.command),
            "titles": [parcel.title for parcel in batch.parcels],
            "after": list(batch.after),
            "at_once": batch.at_once,
            "gpus": batch.placement.gpus,
            "nodes": batch.placement.nodes,
            "cpus": batch.placement.cpus,
            "memory_mb": batch.placement.memory_mb,
            "time_s": batch.placement.time_s,
            "outputs": [str(batch.output(index)) for index in range(len(batch.parcels))],
            "at": time.time(),
            "node_gpus": self._gpus,
            "slots": self._slots,
            "kill_wait_s": self._kill_wait_s,
        }
        # The process that takes it says so: if we die before that, it is taken all the same, or not at all.
        subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(self._state.root), json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PROCESS_ENGINE": str(self._state.root)},
        ).returncode = 0  # it outlives us, and we never wait for it
        deadline = time.monotonic() + 60
        while not (self._state.batches / f"{batch.name}.json").exists():
            if time.monotonic() > deadline:
                raise EngineAway("no answer")
            time.sleep(0.005)
        if (self._state.root / "lose").exists():
            (self._state.root / "lose").unlink()
            raise EngineAway("the connection was lost before the answer came")
        return [f"{batch.name}_{index}" for index in range(len(batch.parcels))]

    def look(self, tickets: Collection[Any]) -> Mapping[int, Any]:
        from gpuherd.engines.base import End, Phase, Sighting

        while (self._state.root / "thinks").exists():
            (self._state.root / "asked").touch()
            time.sleep(_EVERY_S)
        self._answer()
        self.looks += 1
        found = {}
        for ticket in tickets:
            handle = ticket.handle or f"{ticket.batch}_{ticket.index}"
            if not self._state.knows(handle):
                continue
            told = self._state.parcel(handle)
            found[ticket.attempt] = Sighting(
                handle=handle,
                phase=Phase(told["phase"]),
                reason=told.get("reason"),
                end=None if told.get("end") is None else End(told["end"]),
                by=told.get("by"),
                node=told.get("node"),
            )
        return found

    def cancel(self, handles: Collection[str]) -> None:
        self._answer()
        self.cancels += 1
        for handle in handles:
            if self._state.order(handle) is None:
                Orders(self._state).end(handle, "cancelled", by="me")

    def close(self) -> None:
        """Nothing is open."""


# --- the process of a batch: standard library only -----------------------------------------------------------------


@dataclass
class Parcel:
    """One, as its batch's process has it."""

    index: int
    handle: str
    leader: subprocess.Popen[bytes] | None = None
    places: list[Path] = field(default_factory=list)
    node: str = ""
    told: dict[str, Any] | None = None
    asked_at: float | None = None


class Scheduler:
    """Sees one batch through."""

    def __init__(self, state: State, batch: dict[str, Any]):
        self.state = state
        self.batch = batch
        self.parcels = [Parcel(index, f"{batch['name']}_{index}") for index in range(len(batch["titles"]))]
        for parcel in self.parcels:
            state.note(parcel.handle, phase="waiting", reason="Priority")
        write(state.batches / f"{batch['name']}.json", json.dumps({**batch, "pid": os.getpid()}))

    def run(self) -> None:
        waiting = list(self.parcels)
        running: list[Parcel] = []
        while waiting or running:
            for parcel in tuple(waiting):
                if self._is_ended_in_line(parcel):
                    waiting.remove(parcel)
                elif self._may_begin(parcel, len(running)) and self._begin(parcel):
                    waiting.remove(parcel)
                    running.append(parcel)
            for parcel in tuple(running):
                if self._is_ended(parcel):
                    running.remove(parcel)
            time.sleep(_EVERY_S)

    def _is_ended_in_line(self, parcel: Parcel) -> bool:
        order = self.state.order(parcel.handle)
        if order is not None:
            self.state.note(parcel.handle, phase="ended", end=order["how"], by=order["by"])
            return True
        ends = [self.state.end(handle) for handle in self._followed()]
        if any(end is not None and end != "ok" for end in ends):
            self.state.note(parcel.handle, phase="ended", end="never", reason="DependencyNeverSatisfied")
            return True
        return False

    def _may_begin(self, parcel: Parcel, running: int) -> bool:
        released = self.state.root / f"released.{self.batch['titles'][parcel.index]}"
        if (self.state.root / "hold").exists() and not released.exists():
            return False
        if self.batch["at_once"] is not None and running >= self.batch["at_once"]:
            return False
        return all(self.state.end(handle) == "ok" for handle in self._followed())

    def _followed(self) -> list[str]:
        """What it is to come after, as far as that is known: as SLURM does, what is forgotten counts as succeeded."""
        if any((self.state.root / f"early.{title}").exists() for title in self.batch["titles"]):
            return []
        return [each for each in self.batch["after"] if self.state.knows(each)]

    def _begin(self, parcel: Parcel) -> bool:
        slot = self._take("slot", range(self.batch["slots"]), 1)
        if slot is None:
            return False
        for node in NODES:
            gpus = self._take(f"{node}.gpu", range(self.batch["node_gpus"]), self.batch["gpus"])
            if gpus is not None:
                break
        else:
            slot[0].unlink()
            return False
        parcel.places, parcel.node = [*slot, *gpus], node
        environment = {**os.environ, "SLURMD_NODENAME": node, "SLURM_JOB_ID": parcel.handle}
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.name.rpartition(".")[2] for place in gpus)
        with Path(self.batch["outputs"][parcel.index]).open("ab") as output:
            parcel.leader = subprocess.Popen(
                [*self.batch["command"], str(parcel.index)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        self.state.note(parcel.handle, phase="running", node=node, pid=parcel.leader.pid)
        return True

    def _take(self, kind: str, numbers: range, count: int) -> list[Path] | None:
        taken: list[Path] = []
        for number in numbers:
            if len(taken) == count:
                break
            place = self.state.places / f"{kind}.{number}"
            with suppress(FileExistsError):
                os.close(os.open(place, os.O_CREAT | os.O_EXCL))
                taken.append(place)
        if len(taken) == count:
            return taken
        for place in taken:
            place.unlink()
        return None

    def _is_ended(self, parcel: Parcel) -> bool:
        assert parcel.leader is not None
        order = self.state.order(parcel.handle)
        now = time.monotonic()
        if order is not None and parcel.asked_at is None:
            parcel.asked_at, parcel.told = now, order
            if order["kill"]:
                lose(parcel.leader.pid)
            else:
                with suppress(ProcessLookupError):
                    parcel.leader.terminate()
        elif parcel.asked_at is not None and now > parcel.asked_at + self.batch["kill_wait_s"]:
            parcel.leader.kill()
        if parcel.leader.poll() is None:
            return False
        for place in parcel.places:
            place.unlink()
        end = "ok" if parcel.leader.returncode == 0 else "failed"
        by = None
        if parcel.told is not None and end != "ok":
            end, by = parcel.told["how"], parcel.told["by"]
        self.state.note(parcel.handle, phase="ended", end=end, by=by, node=parcel.node)
        return True


def lose(leader: int) -> None:
    """All that the leader has started is gone at once, and so is it."""
    known = {leader}
    for _ in range(3):
        for path in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                if path.name.isdigit():
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent in known:
                        known.add(int(path.name))
    for process in known:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def main() -> None:
    state = State(Path(sys.argv[1]))
    Scheduler(state, json.loads(sys.argv[2])).run()


if __name__ == "__main__":
    main()
