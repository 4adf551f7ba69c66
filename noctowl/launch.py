"""Several processes: whether those that were started are those that the configuration speaks of."""

import os
from collections.abc import Mapping

from noctowl.errors import ConfigError


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
