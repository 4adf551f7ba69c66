"""How a program starts and is stopped: what libraries may say, Ctrl-C, and whether the right processes were started."""

import logging
import os
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Mapping, Sequence

import transformers
from rich.logging import RichHandler

from noctowl.errors import ConfigError

INTERRUPTED = 130  # as shells have it: 128 + SIGINT
# Said by libraries of what is meant to be so.
QUIET = (
    "Experiment logs directory .* exists and is not empty",  # the run folder is new, metrics.csv is not there yet
    "Found .* module.s. in eval mode",  # everything but one layer is frozen
    ".*isinstance.treespec, LeafSpec.. is deprecated",
    "The number of training batches .* is smaller than the logging interval",
    "You're resuming from a checkpoint that ended before the epoch ended",  # our sampler knows its place in the epoch
    "The '.*_dataloader' does not have many workers",
)


def speak() -> None:
    """The program's own messages on the screen; libraries only warn."""
    handler = RichHandler(show_path=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    for noisy in ("pytorch_lightning", "lightning", "httpx", "accelerate", "hydra"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for message in QUIET:
        warnings.filterwarnings("ignore", message=message)


def say_interrupted(error: KeyboardInterrupt) -> int:
    """One line about Ctrl-C, with what the error was told about where it struck. Returns the exit code."""
    print(f"interrupted: {error.args[0] if error.args else 'nothing was written'}", file=sys.stderr)
    return INTERRUPTED


def launch_alone(entry: str, overrides: Sequence[str]) -> tuple[int, str]:
    """Run a command line as a program of its own. Returns its exit code, and the end of what it said on stderr.

    A program that is stopped here stops there too: SIGTERM, and the checkpoint that it writes then is waited for.
    """
    command = [sys.executable, "-m", "noctowl.jobs", entry, *overrides]
    said: deque[str] = deque(maxlen=40)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # a pipe
        try:
            for line in process.stderr:
                said.append(line)
                sys.stderr.write(line)
            return process.wait(), "".join(said)
        except BaseException:
            process.terminate()
            raise


def started(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Number of processes that a launcher outside of this program started, and where that is said; None without one."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment["WORLD_SIZE"]), "torchrun's WORLD_SIZE"
    if "SLURM_STEP_ID" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(environment["SLURM_NTASKS"]), "SLURM_NTASKS"
    return None


def check_processes(devices: int, nodes: int, environment: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError where a launcher started another number of processes than devices x nodes."""
    found = started(os.environ if environment is None else environment)
    if found is not None and found[0] != devices * nodes:
        raise ConfigError(
            f"trainer.devices x trainer.num_nodes = {devices} x {nodes} = {devices * nodes}, but {found[0]} processes "
            f"were started ({found[1]}). One process drives one device: make the two numbers equal."
        )
