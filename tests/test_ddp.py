"""Two processes (gloo, CPU) are one: weights, figures, evaluation with few images. Everything here is time-limited."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file

from noctowl.loggers import read_rows

pytestmark = [pytest.mark.ddp, pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[1]


class Nothing(pl.LightningModule):
    """Something to fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def torchrun(tmp_path: Path, script: str, *words: str, port: int, processes: int = 2) -> subprocess.CompletedProcess:
    """Start a script in several processes, as torchrun does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    return subprocess.run(
        [*launcher, script, *words], capture_output=True, text=True, timeout=250, cwd=tmp_path, env=environment
    )


def test_two_processes_are_one(small, command, tmp_path):
    """2 processes x batch 3 = 2 accumulated batches of 3: same figures, also where the last window is short."""
    words = [*small, "data.coarse_val_file=lvis/coarse_val.json", "trainer.max_epochs=2", "trainer.batch_size=3"]
    words += ["trainer.effective_batch_size=6", "optimizer.name=sgd", "optimizer.lr=0.1", "trainer.progress=false"]
    words += ["report=false"]
    one = command("train", *words)
    assert one.code == 0, one.err
    folder = tmp_path / "two"
    options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_workers=0", f"run_dir={folder}"]
    done = torchrun(tmp_path, str(ROOT / "train.py"), *words, *options, port=29611)
    assert done.returncode == 0, done.stderr[-3000:]
    found, wanted = (load_file(f / "checkpoints" / "best.safetensors") for f in (folder, one.folder))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    two = json.loads((folder / "results.json").read_text())
    assert two["metrics"] == pytest.approx(one.results["metrics"], abs=1e-6)
    assert two["counts"]["steps"] == one.results["counts"]["steps"]
    histories = [r["counts"]["selection"]["history"] for r in (two, one.results)]
    assert [pytest.approx(entry, abs=1e-6) for entry in histories[1]] == histories[0]
    keys = ("train/total_epoch", "train/class_epoch", "val/map", "val/lvis_ap", "train/positives_epoch")
    rows = [[r for r in read_rows(f / "metrics.csv") if "val/map" in r] for f in (folder, one.folder)]
    assert [row["epoch"] for row in rows[0]] == [row["epoch"] for row in rows[1]] == ["-1", "0", "1"]
    for mine, other in zip(*rows):
        for key in [key for key in keys if key in mine or not key.startswith("train/")]:
            assert float(mine[key]) == pytest.approx(float(other[key]), abs=1e-6), key
    assert not list(folder.rglob("part*"))


ADAMW = ["trainer.batch_size=2", "trainer.effective_batch_size=8", "trainer.progress=false"]
ADAMW += ["test=false", "report=false"]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_workers=0"]


@pytest.fixture(scope="module")
def two_epochs(small, tmp_path_factory):
    """Two processes, AdamW (the default) at its default rate, two epochs."""
    folder = tmp_path_factory.mktemp("ddp") / "run"
    words = [*small, *ADAMW, *TWO, "trainer.max_epochs=2", f"run_dir={folder}"]
    done = torchrun(folder.parent, str(ROOT / "train.py"), *words, port=29621)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sync_dist" not in done.stderr
    return folder


@pytest.mark.slow
def test_two_processes_are_one_with_adamw(small, command, two_epochs):
    """Equal gradients but for rounding. Adam divides a gradient by its own size, so rounding is amplified where a
    gradient is near 0 (its epsilon is 1e-8): such a weight may differ by a part of a step (the rate is 1e-3)."""
    one = command("train", *small, *ADAMW, "trainer.max_epochs=2")
    assert one.code == 0, one.err
    stored = [torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (two_epochs, one.folder)]
    assert stored[0]["global_step"] == stored[1]["global_step"] > 2
    for name, value in stored[1]["state_dict"].items():
        torch.testing.assert_close(stored[0]["state_dict"][name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.resume
def test_a_continued_run_of_two_processes(small, tmp_path, two_epochs):
    """1 + 1 epochs are 2, bit by bit: weights, optimiser, choice, steps."""
    folder = tmp_path / "run"
    words = [*small, *ADAMW, *TWO, "trainer.max_epochs=1", f"run_dir={folder}"]
    for call in (words, [f"resume={folder}", "trainer.max_epochs=2"]):
        done = torchrun(tmp_path, str(ROOT / "train.py"), *call, port=29623)
        assert done.returncode == 0, done.stderr[-3000:]
    found, wanted = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (folder, two_epochs))
    assert found["global_step"] == wanted["global_step"] > 2
    assert found["callbacks"] == wanted["callbacks"]
    for name, value in wanted["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value)
    for key, state in wanted["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.equal(found["optimizer_states"][0]["state"][key][name], value)
    heads = [load_file(f / "checkpoints" / "best.safetensors") for f in (folder, two_epochs)]
    assert all(torch.equal(heads[0][name], value) for name, value in heads[1].items())


EVALUATE = """
import json, sys
from pathlib import Path
import torch
from accelerate import PartialState
from noctowl.assembly import Preparation
from noctowl.compose import compose
from noctowl.eval.suite import Suite

suite_rows = Suite.image_rows.fget
ready = Preparation()(compose("train", json.loads(sys.argv[1])))
work = {"batch_size": 2, "num_workers": 0, "device": torch.device("cpu")}
found = {}
for images in (5, 1, 0):
    Suite.image_rows = property(lambda self: suite_rows(self)[:images])
    outcome = ready.validation.predict(ready.detector, Path(sys.argv[2]), stored=ready.frozen.stored, **work)
    part = outcome.predictions["validation"]
    found[images] = {
        "keys": [list(map(int, key)) for key in part.keys()],
        "logits": float(part.logits[part.logits > -1e9].sum()),
        "coarse": [len(outcome.coarse.image), float(outcome.coarse.scores.sum())],
        "counters": outcome.counters,
    }
if PartialState(cpu=True).is_main_process:
    print("FOUND " + json.dumps(found))
"""


def test_few_images_on_two_processes(small, tmp_path):
    """5, 1 and no image: gathered by key, nothing twice, a process without image takes part, none waits for ever."""
    script = tmp_path / "evaluate_some.py"
    script.write_text(EVALUATE)
    words = [*small, "data.coarse_val_file=lvis/coarse_val.json", "trainer=cpu", "test=false"]
    found = []
    for processes in (1, 2):
        exchange = str(tmp_path / f"exchange{processes}")
        done = torchrun(tmp_path, str(script), json.dumps(words), exchange, port=29613, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
        found.append(json.loads(line.removeprefix("FOUND ")))
    one, two = found
    assert [entry["counters"]["images"] for entry in one.values()] == [5, 1, 0]
    for images, entry in one.items():
        assert two[images]["keys"] == entry["keys"]
        assert two[images]["coarse"] == pytest.approx(entry["coarse"], rel=1e-6)
        assert two[images]["logits"] == pytest.approx(entry["logits"], rel=1e-6)
        assert two[images]["counters"] == entry["counters"]


SHARE = """
import json, sys
from pathlib import Path
import torch
from accelerate import PartialState
from noctowl.assembly import Preparation
from noctowl.compose import compose
from noctowl.model import OwlDetector
from safetensors.torch import save_file

torch.set_num_threads(1)
encoded, original = [], OwlDetector.encode_images
OwlDetector.encode_images = lambda self, pixels: encoded.append(len(pixels)) or original(self, pixels)
frozen = Preparation()(compose("train", json.loads(sys.argv[1]))).frozen
rank = PartialState(cpu=True).process_index
tensors = {"tokens": frozen.stored.tokens, "boxes": frozen.stored.boxes, "encoded": torch.tensor(encoded)}
save_file(tensors, f"{sys.argv[2]}-{rank}.safetensors")
"""


def test_features_in_memory_are_shared_out(small, tmp_path):
    """Each process encodes a share of the images, and has the features of all: bit by bit those of one process."""
    script = tmp_path / "share.py"
    script.write_text(SHARE)
    words = [*small, "trainer=cpu", "trainer.num_workers=0", "features=memory", "test=false", "benchmark.batch_size=1"]
    for processes in (1, 2):
        done = torchrun(
            tmp_path, str(script), json.dumps(words), f"of{processes}", port=29619 + processes, processes=processes
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, *two = (load_file(tmp_path / f"{name}.safetensors") for name in ("of1-0", "of2-0", "of2-1"))
    total = len(one["tokens"])
    assert len(one["encoded"]) == total > 10
    assert [len(part["encoded"]) for part in two] == [total // 2, total - total // 2]
    for part in two:
        assert torch.equal(part["tokens"], one["tokens"])
        assert torch.equal(part["boxes"], one["boxes"])


CHECK = """
import sys
import pytorch_lightning as pl
from noctowl.checkpoint import SameEverywhere
from noctowl.errors import ConfigError
from tests.test_ddp import Nothing
import os

trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
                     max_steps=1, enable_progress_bar=False, enable_model_summary=False,
                     callbacks=[SameEverywhere("same" if sys.argv[1] == "same" else os.environ["RANK"])])
try:
    trainer.fit(Nothing())
except ConfigError as error:
    print("REFUSED", error)
    sys.exit(3)
"""


def test_another_configuration_in_a_process_stops_all(tmp_path):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    done = torchrun(tmp_path, str(script), "other", port=29615)
    assert done.returncode != 0
    assert "processes [1] have another configuration than process 0" in done.stdout


def test_torchrun_with_another_number_of_processes_is_refused(small, tmp_path):
    words = [*small, "trainer=ddp", "trainer.devices=3", "trainer.accelerator=cpu", "trainer.batch_size=2"]
    words += ["trainer.effective_batch_size=6", f"run_dir={tmp_path / 'run'}"]
    done = torchrun(tmp_path, str(ROOT / "train.py"), *words, port=29617)
    assert done.returncode != 0
    assert "trainer.devices x trainer.num_nodes = 3 x 1 = 3, but 2 processes were started" in done.stderr
    assert not (tmp_path / "run").exists()
