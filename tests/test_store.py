"""Feature store: keys, equality with features in memory, dtypes, reading, looking after stores."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.utils.data import DataLoader

from noctowl.architectures import ARCHITECTURES
from noctowl.data.batch import collate
from noctowl.data.datamodule import TrainingSet
from noctowl.data.fgovd import read_fgovd
from noctowl.data.images import Preprocessor
from noctowl.errors import ConfigError, DataError
from noctowl.features import ImageSet, chunks
from noctowl.features import store as in_memory
from noctowl.head import cosine
from noctowl.model import ImageFeatures, OwlDetector
from noctowl.store import (
    FeatureStore,
    build,
    describe,
    info,
    measure,
    verify,
)
from noctowl.store.spec import Spec, pack, unpack

from .test_export import detector_of

CPU = torch.device("cpu")
WORK = {"batch_size": 1, "num_workers": 0, "device": CPU}  # one by one: the same bits whatever is built together
ROW = 64 * (160 + 4 + 1) * 4  # bytes of one image of the miniature in fp32
SHARD = 3 * ROW  # three images a shard


def write_images(folder: Path, count: int, seed: int = 0) -> list[tuple[str, tuple[int, int]]]:
    """Small noise pictures of different sizes: (file, (width, height))."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        size = 24 + i % 5, 20 + i % 7
        Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(folder / f"{i:03d}.png")
        found.append((f"{i:03d}.png", size))
    return found


def image_set(folder: Path, detector: OwlDetector, count: int, **options: float) -> ImageSet:
    """An image set over freshly written pictures."""
    images = ImageSet(folder, Preprocessor(detector.image_processor, frame=detector.frame, **options))
    files, sizes = zip(*write_images(folder, count))
    images.add(files, sizes)
    return images


@pytest.fixture(scope="module")
def detector() -> OwlDetector:
    return OwlDetector.from_pretrained("tiny", weights="random", seed=0)


@pytest.fixture
def images(tmp_path, detector) -> ImageSet:
    return image_set(tmp_path / "images", detector, 8)


@pytest.fixture
def store(tmp_path, detector, images) -> FeatureStore:
    return FeatureStore.for_model(tmp_path / "features", detector, images.preprocessor, device=CPU)


class TestKey:
    def test_depends_on_all_that_changes_numbers(self, detector, images):
        base = {"dtype": "fp32", "device": CPU}
        key = describe(detector, images.preprocessor, **base).key
        padded = Preprocessor(detector.image_processor, frame="padded", pad_value=0.5)
        other = OwlDetector.from_pretrained("tiny", weights="random", seed=1)
        keys = {
            key,
            describe(detector, padded, **base).key,
            describe(other, images.preprocessor, **base).key,
            describe(detector, images.preprocessor, dtype="fp16", device=CPU).key,
            describe(detector, images.preprocessor, autocast=torch.bfloat16, **base).key,
        }
        assert len(keys) == 5

    def test_code_and_library_versions_and_resolution(self, detector, images):
        spec = describe(detector, images.preprocessor, device=CPU)
        fields = vars(spec)
        changed = [
            fields | {"encoder_version": spec.encoder_version + 1},
            fields | {"processor": spec.processor | {"size": [192, 192]}},
            fields | {"processor": spec.processor | {"backend": "pil"}},
            fields | {"arithmetic": "float32, TF32 convolutions"},
        ]
        assert len({spec.key, *(Spec(**values).key for values in changed)}) == 5

    def test_does_not_depend_on_the_trained_head(self, images):
        moved = detector_of("owlv2")  # its head has moved since it was loaded
        again = OwlDetector.from_pretrained("tiny", weights="random", seed=3)
        keys = {describe(d, images.preprocessor, device=CPU).key for d in (moved, again)}
        assert len(keys) == 1

    def test_bf16_is_refused_with_the_reason(self, detector, images):
        with pytest.raises(ConfigError, match="8 times as coarsely"):
            describe(detector, images.preprocessor, dtype="bf16", device=CPU)
        with pytest.raises(ConfigError, match="fp32, fp16, int8"):
            describe(detector, images.preprocessor, dtype="fp8", device=CPU)

    def test_meta_tells_all_ingredients_and_opens_without_a_model(self, store, detector, images):
        build(store, detector, images, [0], **WORK)
        meta = json.loads((store.folder / "meta.json").read_text())
        assert meta["key"] == store.folder.name == store.spec.key
        assert meta["ingredients"]["base_sha256"] == detector.content_hash()
        assert meta["ingredients"]["processor"] == images.preprocessor.settings()
        assert FeatureStore.open(store.folder).spec == store.spec


class TestEquality:
    @pytest.mark.parametrize("kind", ["owlv2", "owlvit"])
    def test_fp32_is_exact(self, tmp_path, kind):
        detector = detector_of(kind)
        images = image_set(tmp_path / "images", detector, 7)
        memory = in_memory(detector, images, **WORK)
        store = FeatureStore.for_model(tmp_path / "features", detector, images.preprocessor, device=CPU)
        report = build(store, detector, images, shard_bytes=SHARD, **WORK)
        assert (report.encoded, report.found, report.shards, report.others) == (7, 0, 3, 0)
        reader = store.reader(images)
        rows = list(range(7))
        assert torch.equal(reader.tokens[rows], memory.tokens)
        assert torch.equal(reader.boxes[rows], memory.boxes)
        assert (reader.objectness is None) == (kind == "owlvit")
        live = detector.encode_images(images[4].unsqueeze(0))
        read = reader.read([4])
        assert torch.equal(read.tokens, live.tokens)
        if kind == "owlv2":
            assert torch.equal(read.objectness, live.objectness)

    def test_a_second_build_writes_nothing(self, store, detector, images):
        build(store, detector, images, shard_bytes=SHARD, **WORK)
        before = {p: p.stat().st_mtime_ns for p in store.folder.iterdir()}
        report = build(store, detector, images, **WORK)
        assert (report.encoded, report.found, report.bytes) == (0, 8, 0)
        assert {p: p.stat().st_mtime_ns for p in store.folder.iterdir()} == before

    def test_other_splits_share_what_is_there(self, store, detector, images):
        assert build(store, detector, images, [0, 1, 2], **WORK).encoded == 3
        report = build(store, detector, images, [2, 3, 1], **WORK)
        assert (report.images, report.found, report.encoded) == (3, 2, 1)

    def test_equal_files_are_encoded_once(self, tmp_path, store, detector, images):
        copy = tmp_path / "images" / "copy.png"
        copy.write_bytes((tmp_path / "images" / "002.png").read_bytes())
        images.add(["copy.png"], [images.sizes[2]])
        assert build(store, detector, images, **WORK).encoded == 8
        reader = store.reader(images)
        assert torch.equal(reader.tokens[8], reader.tokens[2])

    def test_workers_and_batches_change_nothing_but_rounding(self, tmp_path, detector, images, store):
        report = build(store, detector, images, batch_size=3, num_workers=2, device=CPU, shard_bytes=SHARD)
        assert (report.encoded, report.shards) == (8, 3)
        memory = in_memory(detector, images, **WORK)
        torch.testing.assert_close(store.reader(images).tokens[:], memory.tokens, rtol=0, atol=1e-5)


class TestDtypes:
    @pytest.mark.parametrize(("dtype", "cosine_limit", "share"), [("fp16", 1.6e-4, 0.515), ("int8", 1e-2, 0.279)])
    def test_error_and_size(self, tmp_path, detector, images, dtype, cosine_limit, share):
        store = FeatureStore.for_model(tmp_path / "f", detector, images.preprocessor, dtype=dtype, device=CPU)
        build(store, detector, images, **WORK)
        memory, reader = in_memory(detector, images, **WORK), store.reader(images)
        assert reader.tokens[0].dtype == torch.float32
        assert torch.equal(reader.boxes[:], memory.boxes)  # boxes stay fp32
        error = measure(store, detector, images, list(range(8)), **WORK)
        assert 0 < error["cosine"] <= cosine_limit
        assert error["cosine"] <= error["bound"] < 3 * cosine_limit
        assert error["boxes"] == 0
        assert store.spec.bytes_per_image / ROW == pytest.approx(share, abs=1e-3)
        # info knows it from the build, from the first image of each shard
        told = info(tmp_path / "f")[0]["error"]
        assert told["bound"] == pytest.approx(error["bound"], rel=0.5)

    def test_measured_error_is_that_of_similarities(self, tmp_path, detector, images):
        store = FeatureStore.for_model(tmp_path / "f", detector, images.preprocessor, dtype="int8", device=CPU)
        build(store, detector, images, **WORK)
        queries = torch.eye(96)[:5]
        exact, stored = in_memory(detector, images, **WORK).tokens[:2], store.reader(images).tokens[:2]
        embedded = [detector.teacher.embed(t) for t in (exact, stored)]
        shared = queries.expand(2, -1, -1)
        expected = float((cosine(embedded[0], shared) - cosine(embedded[1], shared)).abs().max())
        found = measure(store, detector, images, [0, 1], queries=queries, **WORK)
        assert found["cosine"] == pytest.approx(expected, abs=1e-7)

    def test_int8_by_hand(self, detector, images):
        spec = Spec(**{**vars(describe(detector, images.preprocessor, dtype="int8", device=CPU)), "objectness": False})
        tokens = torch.tensor([[[1.27, -0.5, 0.014, 0.0], [0.0, 0.0, 0.0, 0.0]]])
        packed = pack(ImageFeatures(tokens, torch.zeros(1, 2, 4), None), spec)
        assert packed["tokens"].tolist() == [[[127, -50, 1, 0], [0, 0, 0, 0]]]
        back = unpack(packed["tokens"], packed["scales"])
        torch.testing.assert_close(back[0, 0], torch.tensor([1.27, -0.5, 0.01, 0.0]))

    def test_fp16_refuses_what_it_cannot_hold(self, detector, images):
        spec = describe(detector, images.preprocessor, dtype="fp16", device=CPU)
        tokens = torch.full((1, 64, 160), 7e4)
        with pytest.raises(DataError, match="fp32"):
            pack(ImageFeatures(tokens, torch.zeros(1, 64, 4), torch.zeros(1, 64)), spec)

    def test_bytes_of_the_real_models(self, images, detector):
        """Known amounts: 15,366 images take 109 to 326 GB of fp32 tokens."""
        like = describe(detector, images.preprocessor, device=CPU)
        amounts = {}
        for name, config in ARCHITECTURES.items():
            vision = config().vision_config
            patches = (vision.image_size // vision.patch_size) ** 2
            sizes = {"patches": patches, "width": vision.hidden_size, "objectness": name.startswith("owlv2")}
            amounts[name] = Spec(**{**vars(like), **sizes}).bytes_per_image
        assert amounts["owl_b16"] == 2304 * (768 + 4) * 4
        assert amounts["owlv2_l14"] == 5184 * (1024 + 4 + 1) * 4
        assert 109e9 < 15366 * amounts["owl_b16"] < 110e9
        assert 326e9 < 15366 * amounts["owlv2_l14"] < 329e9


class TestReading:
    def test_indexing_is_that_of_a_tensor(self, store, detector, images):
        build(store, detector, images, shard_bytes=SHARD, **WORK)
        memory, reader = in_memory(detector, images, **WORK), store.reader(images)
        assert reader.tokens.shape == memory.tokens.shape
        assert reader.boxes.shape == memory.boxes.shape
        assert len(reader) == len(reader.tokens) == 8
        for index in (5, -1, np.int64(3), torch.tensor(2), [1, 5, 7], [2, 2], np.array([4, 0]), slice(1, 6, 2)):
            assert torch.equal(reader.tokens[index], memory.tokens[index])
        assert reader.tokens[[]].shape == (0, 64, 160)
        with pytest.raises(IndexError):
            reader.tokens[8]

    def test_takes_the_place_of_features_in_memory(self, store, detector, images):
        build(store, detector, images, **WORK)
        memory = in_memory(detector, images, **WORK)
        for (rows, a), (again, b) in zip(chunks(store.reader(images), [6, 1, 3], 2), chunks(memory, [6, 1, 3], 2)):
            assert rows == again
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.boxes, b.boxes)

    def test_training_items_and_workers(self, store, detector, images, fgovd, write_fgovd):
        for entry, (file, size) in zip(fgovd["images"], zip(images.files, images.sizes)):
            entry.update(file_name=file, width=size[0], height=size[1])
        for annotation in fgovd["annotations"]:
            annotation["bbox"] = [1, 2, 10, 12]
        annotations = read_fgovd(write_fgovd(fgovd))
        build(store, detector, images, **WORK)
        options = (annotations, np.ones(len(annotations), bool), 10, images, np.arange(2), torch.eye(6, 96))
        sets = [
            TrainingSet(*options, np.arange(6), detector.frame, stored=stored)
            for stored in (in_memory(detector, images, **WORK), store.reader(images))
        ]
        batches = [
            list(DataLoader(items, batch_size=2, num_workers=n, collate_fn=collate)) for items, n in zip(sets, (0, 2))
        ]
        for one, other in zip(*batches):
            assert one.keys == other.keys
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.patch_boxes, other.patch_boxes)

    def test_survives_pickling(self, store, detector, images):
        build(store, detector, images, **WORK)
        reader = store.reader(images)
        first = reader.tokens[3].clone()
        data = pickle.dumps(reader)
        assert len(data) < 20_000  # no features in it
        assert torch.equal(pickle.loads(data).tokens[3], first)

    def test_missing_images_are_named(self, store, detector, images):
        build(store, detector, images, [0, 1], **WORK)
        with pytest.raises(DataError, match=r"2 of 3 images .* 004\.png, 006\.png"):
            store.reader(images, [1, 4, 6])
        with pytest.raises(DataError, match=r"003\.png was not asked for"):
            store.reader(images, [0]).tokens[3]

    def test_by_identity(self, store, detector, images):
        build(store, detector, images, **WORK)
        wanted = list(store.identities(images, [5, 2]).values())
        reader = store.read(wanted)
        assert torch.equal(reader.tokens[:], store.reader(images).tokens[[5, 2]])
        with pytest.raises(DataError, match="f" * 64):
            store.read(["f" * 64 + "-10x10"])

    def test_shards_are_plain_safetensors(self, store, detector, images):
        build(store, detector, images, [0, 1], **WORK)
        (path,) = store.folder.glob("*.safetensors")
        with safe_open(path, "pt") as file:
            assert sorted(file.keys()) == ["boxes", "objectness", "tokens"]
            assert torch.equal(file.get_tensor("tokens"), store.reader(images, [0, 1]).tokens[[0, 1]])
            assert json.loads(file.metadata()["noctowl"])["key"] == store.spec.key

    def test_a_changed_view_does_not_reach_the_file(self, store, detector, images):
        build(store, detector, images, **WORK)
        store.reader(images).tokens[0].zero_()
        assert verify(store.root)[0]["problems"] == []
        assert float(store.reader(images).tokens[0].abs().max()) > 0

    def test_prefetch_is_harmless(self, store, detector, images):
        build(store, detector, images, shard_bytes=SHARD, **WORK)
        reader = store.reader(images)
        reader.prefetch([0, 7, 3])
        assert reader.tokens[7].shape == (64, 160)
