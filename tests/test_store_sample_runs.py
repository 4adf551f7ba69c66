"""Samples of background patches: the room that they need, and runs that train on them."""

# ruff: noqa: F811  (fixtures of other files are used as arguments)

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from noctowl.compose import compose
from noctowl.config import EvaluateConfig, TrainConfig, check
from noctowl.errors import DataError
from noctowl.features import store as in_memory
from noctowl.store import build, folder, info
from noctowl.store.sample import candidates

from .test_ddp import torchrun
from .test_store import WORK, detector, images, store  # noqa: F401
from .test_store_sample import HANDMADE

build_module = sys.modules[build.__module__]  # the package has a function of that name


class TestRoom:
    """Needed at most: all patches. Where that does not fit: what candidates leave, counted on some images."""

    def test_upper_bound_then_estimate(self, store, detector, images, monkeypatch):
        targets = {row: [HANDMADE[0], HANDMADE[3]][row % 2] for row in range(8)}
        sampled = store.sampled(8, 0, targets)
        unit, memory = (160 + 4 + 1) * 4, in_memory(detector, images, **WORK)
        kept = [int(candidates(pred_boxes=memory.boxes[row], targets=targets[row]).sum()) + 8 for row in range(8)]
        assert 8 * 8 < sum(kept) < 8 * 64
        room = sampled.room(images)
        assert (room.missing, room.needed, room.estimated) == (8, 8 * 64 * unit, False)
        exact = sum(kept) * unit  # fewer images than the pilot takes: all of them are counted
        monkeypatch.setattr(folder, "free_bytes", lambda _: exact - 1)
        with pytest.raises(
            DataError, match=rf"about .*\({exact} bytes\), .*\({exact - 1} bytes\).*features.background"
        ):
            build(sampled, detector, images, **WORK)
        assert not store.root.exists()
        monkeypatch.setattr(folder, "free_bytes", lambda _: exact + 99)
        with pytest.raises(DataError, match=r"those kept with all patches .*\(100 bytes\) more"):
            build(sampled, detector, images, beside=100, **WORK)
        assert build(sampled, detector, images, beside=99, **WORK).bytes == exact

    def test_pilot_images_are_spread_and_get_a_margin(self, store, detector, images, monkeypatch):
        sampled = store.sampled(8, 0, {row: [HANDMADE[0], HANDMADE[3]][row % 2] for row in range(8)})
        build(sampled, detector, images, [0], **WORK)
        monkeypatch.setattr(build_module, "PILOT", 3)
        looked, real = [], build_module.encode

        def encode(detector, images, rows, **work):
            looked.append(rows)
            return real(detector, images, rows, **work)

        monkeypatch.setattr(build_module, "encode", encode)
        wanted = {name: row for row, name in sampled.identities(images).items()}
        room = sampled.room(images)
        found = build_module.estimated(sampled, detector, images, wanted, room, **WORK)
        assert looked == [[1, 3, 5]]
        kept = [
            int(candidates(pred_boxes=boxes, targets=sampled.targets[row]).sum()) + 8
            for row, boxes in enumerate(in_memory(detector, images, **WORK).boxes)
        ]
        three = [kept[row] for row in looked[0]]
        mean = min(64, np.mean(three) + 2 * np.std(three, ddof=1) / 3**0.5)
        assert found.needed == int(np.ceil(7 * mean * 660))
        assert found.estimated
        assert found.needed < room.needed == 7 * 64 * 660

    def test_both_stores_of_a_run_are_counted_before_either_is_written(self, small, command, tmp_path, monkeypatch):
        words = [*small, "features=disk", "test=false", "features.background=64", "trainer.num_workers=0"]
        assert command("train", *words, f"features.root={tmp_path / 'one'}").code == 0
        stored = [entry for entry in info(tmp_path / "one") if entry["kind"] == "images"]
        assert [entry["background"] is None for entry in stored].count(True) == 1
        total = sum(entry["images"] * entry["bytes_per_image"] for entry in stored)
        monkeypatch.setattr(folder, "free_bytes", lambda _: total - 1)
        refused = command("train", *words, f"features.root={tmp_path / 'two'}")
        assert refused.code == 2
        assert "those kept with all patches" in refused.err
        assert list((tmp_path / "two").glob("*/shard-*")) == []


class TestRuns:
    def test_where_it_is_allowed(self):
        tree = compose("train", ["features=disk", "features.background=64"])
        assert check(tree, TrainConfig) == []
        (problem,) = check({**tree, "features": {**tree["features"], "mode": "memory"}}, TrainConfig)
        assert (problem.key, problem.found) == ("features.background", "64 with features.mode=memory")
        tree = compose("evaluate", ["features=disk"])
        (problem,) = check({**tree, "features": {**tree["features"], "background": 64}}, EvaluateConfig)
        assert "evaluation needs all patches" in problem.allowed

    def test_training_on_samples(self, small, command, tmp_path):
        """All patches as a sample: the run of the full store. Fewer: the same assignment, another background."""
        words = [*small, "features=disk", f"features.root={tmp_path}", "test=false", "trainer.num_workers=0"]
        runs = [command("train", *words, *more) for more in ([], ["features.background=64"], ["features.background=8"])]
        assert [run.code for run in runs] == [0, 0, 0], [run.err for run in runs]
        heads = [load_file(run.folder / "checkpoints" / "best.safetensors") for run in runs]
        for name, value in heads[0].items():
            torch.testing.assert_close(heads[1][name], value, rtol=0, atol=1e-6)
            assert not torch.equal(heads[2][name], value)
        again = command("train", *words, "features.background=8", "loss=bce")
        assert ", 0 encoded" in again.results["counts"]["features"]

    @pytest.mark.slow
    @pytest.mark.ddp
    @pytest.mark.timeout(280)
    def test_every_way_of_training_gives_the_same_head(self, small, command, tmp_path):
        """Batches of different length on padded samples: two epochs at once, one and one, beside another head, and in
        two processes that share the batches."""
        words = [*small, "features=disk", f"features.root={tmp_path / 'f'}", "test=false", "report=false", "loss=bce"]
        words += ["features.background=8", "trainer.batch_size=3", "trainer.effective_batch_size=6"]
        words += ["optimizer.name=sgd", "optimizer.lr=0.1", "trainer.num_workers=0", "trainer.progress=false"]
        once = command("train", *words, "trainer.max_epochs=2")
        first = command("train", *words)
        heads = {"once": once.folder}
        assert (once.code, first.code) == (0, 0), once.err + first.err
        assert command("train", f"resume={first.folder}", "trainer.max_epochs=2").code == 0
        heads["continued"] = first.folder
        sweep = [word for word in words if word != "loss=bce"]
        beside = command("train", *sweep, "loss=bce,triplet", "trainer.max_epochs=2", f"output_dir={tmp_path}", "-m")
        assert beside.code == 0, beside.err
        jobs = json.loads(next(tmp_path.glob("*/sweep-*/sweep.json")).read_text())["jobs"]
        heads["beside another"] = Path(jobs[0]["folder"])
        options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.num_workers=0", "trainer.max_epochs=2"]
        heads["two processes"] = tmp_path / "two"
        script = str(Path(__file__).parents[1] / "train.py")
        done = torchrun(tmp_path, script, *words, *options, f"run_dir={heads['two processes']}", port=29631)
        assert done.returncode == 0, done.stderr[-3000:]
        wanted = load_file(once.folder / "checkpoints" / "best.safetensors")
        for way, place in heads.items():
            found = load_file(place / "checkpoints" / "best.safetensors")
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=way)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["fp16", "int8"])
    def test_dtypes_train_as_all_patches_do(self, small, command, tmp_path, dtype):
        """k of all: what an item reads is the full store's, scales included."""
        words = [*small, "features=disk", f"features.root={tmp_path}", f"features.dtype={dtype}", "test=false"]
        runs = [command("train", *words, *more) for more in ([], ["features.background=64"], ["features.background=8"])]
        assert [run.code for run in runs] == [0, 0, 0], [run.err for run in runs]
        heads = [load_file(run.folder / "checkpoints" / "best.safetensors") for run in runs]
        for name, value in heads[0].items():
            torch.testing.assert_close(heads[1][name], value, rtol=0, atol=1e-6)
            assert not torch.equal(heads[2][name], value)
