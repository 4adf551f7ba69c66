"""The command line of train.py and evaluate.py: one job, or all of a sweep, here or where Hydra's launchers put them.

A job of a sweep that drives several devices is a program of its own: the processes that Lightning adds start their
program anew, and would run the whole sweep.
"""

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from noctowl import checkpoint, compose, runfolder
from noctowl.assembly import Preparation
from noctowl.errors import ConfigError, NoctowlError
from noctowl.launch import launch_alone, say_interrupted, speak, started
from noctowl.run import evaluate, train, train_together
from noctowl.sweeps import Sweep, brief, told

log = logging.getLogger("noctowl")


def main(entry: str, argv: Sequence[str] | None = None) -> int:
    """Command line of train.py and evaluate.py.

    Returns the exit code: 0, 2 where the user has something to mend, or 130 after Ctrl-C.
    """
    speak()
    words = list(sys.argv[1:] if argv is None else argv)
    failed: list[str] = []
    with checkpoint.stoppable():
        try:
            if any(word.startswith("resume_sweep=") for word in words):
                continue_sweep(words, failed)
            else:
                swept = bool({"-m", "--multirun"} & set(words))
                task = partial(run_jobs, entry, failed=failed, swept=swept)
                compose.dispatch(entry, words, task, alone=entry == "train" and started(os.environ) is None)
        except NoctowlError as error:
            failed.append(str(error))
        except KeyboardInterrupt as error:
            return say_interrupted(error)
    for message in failed:
        print(f"error: {message}", file=sys.stderr)
    return 2 if failed else 0


def continue_sweep(words: Sequence[str], failed: list[str]) -> None:
    """The jobs of an earlier sweep that have not finished; those that were stopped go on where they have a checkpoint.

    Raises ConfigError if anything else is asked for.
    """
    given = next(w for w in words if w.startswith("resume_sweep=")).split("=", 1)[1]
    if not given:
        raise ConfigError("resume_sweep (command line): found ''; allowed: the folder of a sweep, which has sweep.json")
    others = [w for w in words if not w.startswith("resume_sweep=") and w not in ("-m", "--multirun")]
    if others:
        raise ConfigError(f"resume_sweep: the jobs are run as they were; leave out {' '.join(others)}")
    sweep = Sweep.open(Path(given))
    sweep.save()
    left = sweep.pending()
    log.info("%s of %s jobs have finished", len(sweep.jobs) - len(left), len(sweep.jobs))
    jobs = []
    for overrides, folder in left:
        tree = compose.compose("train", overrides)
        goes_on = folder is not None and (folder / "checkpoints" / "last.ckpt").is_file()
        if folder is not None:
            how = "continued" if goes_on else "started again: no last.ckpt, which heads trained together do not have"
            log.info("stopped: %s is %s", folder, how)
        jobs.append(({**tree, "resume": str(folder)} if goes_on else tree, overrides))
    run_jobs("train", jobs, failed=failed, sweep=sweep)


def run_jobs(
    entry: str,
    jobs: Sequence[compose.Job],
    launch: compose.Launch | None = None,
    *,
    failed: list[str],
    swept: bool = False,
    sweep: Sweep | None = None,
) -> None:
    """One job, or all of a sweep: the others go on when one fails, whatever the reason; errors go into `failed`.

    Args:
        launch: puts the jobs, by number, where a launcher of Hydra's wants them; None: they run here.
        sweep: the record of an earlier sweep that is continued; a new one is begun for `swept` jobs of training.
    """
    if swept and any(tree.get("resume") is not None for tree, _ in jobs):
        raise ConfigError(
            "resume continues one run and takes no -m: continue runs one by one, or a whole sweep with "
            "resume_sweep=<its folder>. Nothing was touched."
        )
    if swept and sweep is None and jobs and (entry == "train" or launch is not None):
        parent = Path(jobs[0][0]["output_dir"]) / jobs[0][0]["name"]
        sweep = Sweep.begin(parent, [overrides for _, overrides in jobs])
    if launch is not None and sweep is not None:
        try:
            launch(partial(run_launched, entry, jobs, sweep.folder), sweep.folder)
        finally:  # a launcher may end the program
            sweep = Sweep.open(sweep.folder)
            sweep.save()
        failed += [job["error"] or f"{job['folder']}: stopped" for job in sweep.jobs if job["status"] != "finished"]
    else:
        preparation = Preparation()
        for group in _groups(jobs) if entry == "train" else [[job] for job in jobs]:
            failed += _attempt(entry, group, preparation, sweep)
    if sweep is not None:
        if entry == "train":
            sweep.plot()
        print(f"sweep: {sweep.folder / 'sweep.json'}")


def run_launched(entry: str, jobs: Sequence[compose.Job], folder: Path, number: int) -> None:
    """Job `number` of the sweep in `folder`, in a process of a launcher; its end is in the sweep's record."""
    speak()
    with checkpoint.stoppable():
        _attempt(entry, [jobs[number]], Preparation(), Sweep.open(folder, number))


def _attempt(entry: str, group: Sequence[compose.Job], preparation: Preparation, sweep: Sweep | None) -> list[str]:
    """One job, or several side by side. Returns the errors; what was not foreseen is raised where no sweep goes on."""
    tree, overrides = group[0]
    try:
        if entry == "evaluate":
            results = evaluate(tree, overrides=overrides, preparation=preparation)
            if sweep is not None:
                sweep.mark(overrides, "finished", folder=Path(results["folder"]))
        elif len(group) > 1:
            return train_together(group, preparation=preparation, sweep=sweep)[1]
        elif sweep is not None and tree["trainer"]["devices"] > 1:
            return _alone(tree, overrides, sweep)
        else:
            train(tree, overrides=overrides, preparation=preparation, sweep=sweep)
    except KeyboardInterrupt as error:
        if sweep is not None:
            error.args = (f"{sweep.folder}; continue with resume_sweep={sweep.folder}",)
        raise
    except Exception as error:
        if not isinstance(error, NoctowlError) and sweep is None:
            raise
        if sweep is not None:
            for _, words in group:
                sweep.mark(words, "failed", error=told(error))
        return [brief(error)]
    return []


def _alone(tree: compose.Tree, overrides: list[str], sweep: Sweep) -> list[str]:
    """A job with several devices, as a program of its own."""
    if tree["resume"] is not None:
        folder, words = Path(tree["resume"]), [compose.word("resume", tree["resume"])]
    else:
        folder = runfolder.create_run_folder(tree["output_dir"], tree["name"], tree["run_dir"])
        words = compose.merged(overrides, [compose.word("run_dir", str(folder))])
        if tree["logger"]["name"] == "wandb" and tree["logger"]["group"] is None:
            words.append(compose.word("logger.group", sweep.folder.name))
    sweep.mark(overrides, "running", folder=folder)
    code, said = launch_alone("train", words)
    sweep.mark(overrides, "failed" if code else "finished", error=said if code else "")
    return [f"{folder}: exit code {code}"] if code else []


def _groups(sweep: Sequence[compose.Job]) -> list[list[compose.Job]]:
    """Jobs that see the same batches in the same order are trained together (`together=false` keeps them apart)."""
    groups: dict[str, list[compose.Job]] = {}
    for number, (tree, overrides) in enumerate(sweep):
        key = Preparation.key(tree) + str(tree["seed"])
        own_folder = tree["run_dir"] is not None or tree["resume"] is not None
        apart = not tree["together"] or own_folder or tree["trainer"]["devices"] > 1
        groups.setdefault(f"{number}" if apart else key, []).append((tree, overrides))
    return list(groups.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
