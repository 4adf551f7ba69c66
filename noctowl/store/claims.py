"""Several builders of one store: who computes what, so that no image is encoded twice.

Each builder has a file `claims/<builder>.json` with the images that it has taken, and touches it while it lives. A
claim is void once its process is gone (same machine) or its file has not been touched for STALE seconds (other
machines; both times are the file system's own). Claims are taken under a lock of the kernel (flock), which no crash
leaves behind. Where a file system has no such locks, two builders may encode the same image: the store then holds it
twice, which is harmless.
"""

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from noctowl.runfolder import atomic
from noctowl.store.spec import canonical

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STALE = 120.0  # seconds without a sign of life from another machine
HEARTBEAT = 15.0


def idle_seconds(path: Path) -> float:
    """Seconds since a file was written to; 0 if it has just gone."""
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def machine() -> str:
    """This machine and, in containers, this world of process ids."""
    try:
        world = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        world = ""
    return f"{platform.node()} {world}"


class Claims:
    """This builder's claim and its view of the others', as a context: entering writes the file, leaving removes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.builder = folder / "claims", uuid.uuid4().hex[:12]
        self.path = self.folder / f"{self.builder}.json"
        self.lock_path = folder / "lock"
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Claims":
        self.folder.mkdir(exist_ok=True)
        self.take(())
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._heart.join()
        self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Alone among the builders, for as long as it takes to look around and take a part."""
        with self.lock_path.open("a") as file:
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def take(self, images: Sequence[str]) -> None:
        """Claim these identities, and no longer the ones before."""
        own = psutil.Process()
        claim = {"machine": machine(), "pid": own.pid, "started": own.create_time(), "images": list(images)}
        with atomic(self.path) as file:
            file.write(canonical(claim))

    def others(self) -> dict[str, set[str]]:
        """Images claimed by each other builder that lives. Void claims are removed."""
        os.utime(self.path)
        now = self.path.stat().st_mtime
        found = live_claims(self.folder, now)
        found.pop(self.builder, None)
        return found


def live_claims(folder: Path, now: float, *, remove: bool = True) -> dict[str, set[str]]:
    """Builder -> identities, for every builder that lives at time `now` (seconds). Void claims are removed."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            claim = json.loads(path.read_bytes())
            alive = _alive(claim, now - path.stat().st_mtime)
        except FileNotFoundError:
            continue  # its builder has just left
        except (ValueError, KeyError, TypeError):
            claim, alive = {}, False
        if alive:
            found[path.stem] = set(claim["images"])
        elif remove:
            path.unlink(missing_ok=True)
    return found


def _alive(claim: dict, age: float) -> bool:
    if claim["machine"] != machine():
        return age < STALE
    try:
        return abs(psutil.Process(int(claim["pid"])).create_time() - float(claim["started"])) < 1.0
    except psutil.NoSuchProcess:
        return False
