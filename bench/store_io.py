"""What the feature store costs beside the bare disk, and how large stores become.

    python bench/store_io.py [--folder DIR] [--quick]

Rates. Random features of OWL-ViT B/16's shape (2304 patches of width 768) go through the builder's writer (dtype,
checksums, safetensors, fsync) and come back through the reader, in random order. Beside each, in the same minute, the
bare disk: the same bytes written with fsync, and the same files read from end to end. "cold" means that
the pages were dropped from the system's cache before, "warm" that they are in it; "first" is a process's first look at
a row, where its checksum is compared. A figure is the median over rounds. Backbone time is not in here.

Sizes. Bytes per image for each model and dtype, and for the 15,366 images of FG-OVD (all training, validation and
benchmark images).

Samples of background patches (features.background=k): patches kept, bytes left, and the expected relative error of the
background term's gradient, in closed form, of one item (median) and of a batch of 32: the pretrained miniature on its
own training images, and B/16 at 384 px with random weights on noise.

The last line is JSON. `ratio` is the cold read rate of fp32 as a share of the disk's, by one process, with checksums
and the copy into a batch; the limit is 1 (several loader processes come closer). `equal`: every row came back bit by
bit, and a single row of a cold shard took no more from the disk than twice its bytes (where the system counts them).
"""

import common  # isort: skip: sets the number of threads
import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from results import write_section
from rich.console import Console
from rich.table import Table
from torch import nn

from noctowl.architectures import ARCHITECTURES
from noctowl.data.datamodule import TrainingSet
from noctowl.data.synthetic import write_synthetic
from noctowl.features import TextBank
from noctowl.features import store as in_memory
from noctowl.frozen import make_images
from noctowl.head import TeacherHead
from noctowl.model import ImageFeatures, OwlDetector
from noctowl.runfolder import write_json
from noctowl.store.accuracy import background_error
from noctowl.store.build import SHARD_BYTES, ShardWriter
from noctowl.store.folder import FeatureStore
from noctowl.store.reader import FeatureReader
from noctowl.store.spec import DTYPES, ENCODER_VERSION, LAYOUT_VERSION, Spec
from noctowl.training import training_data

IMAGES = 15_366
GATE, GOAL = 0.3, 0.6
QUICK = {"images": 48, "rounds": 3}  # 0.34 GB of fp32
FULL = {"images": 144, "rounds": 5}  # 1.0 GB
BLOCK = 1 << 20
AHEAD = 4
BATCH = 32
TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"


def spec_of(name: str, dtype: str) -> Spec:
    """The shapes of a real model; nothing else of it is needed here."""
    config = ARCHITECTURES[name]()
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    shape = {"patches": patches, "width": vision.hidden_size, "objectness": config.model_type == "owlv2"}
    versions = {"encoder_version": ENCODER_VERSION, "layout_version": LAYOUT_VERSION}
    return Spec(base_sha256=f"bench {name}", processor={}, dtype=dtype, arithmetic="float32", **versions, **shape)  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    """Wall time: disks are not measured in CPU time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache. They were fsynced, so nothing is lost."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_disk() -> int | None:
    """Bytes that this process has had read from the disk; None where the system does not count."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def write_raw(path: Path, data: memoryview, count: int) -> None:
    """`count` times the same block, then fsync."""
    with path.open("wb") as file:
        for _ in range(count):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_raw(folder: Path) -> None:
    """Every byte of a folder's shards, in the order in which they lie, into one buffer."""
    buffer = bytearray(8 * BLOCK)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_store(reader: FeatureReader, rows: list[int], batch: torch.Tensor) -> None:
    """Rows as training reads them: copied into a batch, the next ones asked for ahead."""
    reader.prefetch(rows[:AHEAD])
    for i, row in enumerate(rows):
        reader.prefetch(rows[i + AHEAD : i + AHEAD + 1])
        batch[i % len(batch)] = reader.tokens[row]
        reader.boxes[row]


def measure(root: Path, dtype: str, *, images: int, rounds: int) -> dict[str, float]:
    """Rates in GB/s of stored bytes, as medians, and whether what was read is what was written."""
    spec = spec_of("owl_b16", dtype)
    generator = torch.Generator().manual_seed(0)
    pool = ImageFeatures(
        torch.randn(8, spec.patches, spec.width, generator=generator), torch.rand(8, spec.patches, 4), None
    )
    names = [f"{i:064x}-640x480" for i in range(images)]
    detector = SimpleNamespace(teacher=TeacherHead(nn.Linear(spec.width, 512)))
    total, rates = images * spec.bytes_per_image, {}
    times: dict[str, list[float]] = {name: [] for name in ("write raw", "write", "cold raw", "cold", "warm", "first")}
    block = memoryview(bytearray(os.urandom(BLOCK) * 8))
    rows = list(range(images))
    batch = torch.empty(8, spec.patches, spec.width)
    one_row = []
    for number in range(rounds):
        raw = root / "raw"
        times["write raw"].append(seconds(lambda r=raw: write_raw(r, block, total // len(block) + 1)))
        raw.unlink()
        store = FeatureStore(root / f"{dtype}-{number}", spec)
        times["write"].append(seconds(lambda s=store: _write(s, detector, pool, names)))
        random.Random(number).shuffle(rows)

        def opened(store: FeatureStore = store) -> FeatureReader:
            return store.read(names)

        forget(store.folder)
        times["cold raw"].append(seconds(lambda s=store: read_raw(s.folder)))
        forget(store.folder)
        times["cold"].append(seconds(lambda o=opened: read_store(o(), rows, batch)))
        reader = opened()
        times["first"].append(seconds(lambda r=reader: read_store(r, rows, batch)))
        times["warm"].append(seconds(lambda r=reader: read_store(r, rows, batch)))
        equal = all(torch.equal(reader.tokens[row], _stored(pool.tokens[row % 8], dtype)) for row in rows[:24])
        del reader  # pages that are mapped would stay
        forget(store.folder)
        before = from_disk()
        opened().tokens[images // 2]
        if before is not None:
            one_row.append((from_disk() or 0) - before)
        rates["equal"] = rates.get("equal", True) and equal
        for path in store.folder.glob("shard-*"):
            path.unlink()
    return {
        **{name: total / statistics.median(values) / 1e9 for name, values in times.items()},
        **rates,
        "read_share": statistics.median(a / b for a, b in zip(times["cold raw"], times["cold"])),
        "write_share": statistics.median(a / b for a, b in zip(times["write raw"], times["write"])),
        "one_row": max(one_row, default=0) / spec.bytes_per_image,
    }


def _write(store: FeatureStore, detector: SimpleNamespace, pool: ImageFeatures, names: list[str]) -> None:
    store.create("bench")
    with ShardWriter(store, detector, "bench", SHARD_BYTES) as writer:  # type: ignore[arg-type]
        for start in range(0, len(names), 8):
            writer.add(names[start : start + 8], pool)
        writer.flush()


def _stored(tokens: torch.Tensor, dtype: str) -> torch.Tensor:
    """What a dtype makes of tokens [P, Dv], in one line each."""
    if dtype == "int8":
        scales = tokens.abs().amax(-1, keepdim=True) / 127
        return (tokens / scales).round() * scales
    return tokens.to(DTYPES[dtype]).float()


def miniature(root: Path, n_images: int) -> tuple[OwlDetector, TrainingSet]:
    """The pretrained miniature and training items on rendered images, their features in memory."""
    detector = OwlDetector.from_pretrained(TINY)
    world = write_synthetic(root / "world", n_train=n_images, n_val=1, n_test=1)
    images, bank = make_images(detector, world / "images", 0.0), TextBank(detector, policy="drop", device=common.CPU)
    options = {"images": images, "bank": bank, "n_negatives": 10, "short_vocabularies": "keep"}
    file = world / "annotations" / "training_sets" / "1_attributes.json"
    dataset = training_data(file, detector=detector, **options).dataset  # type: ignore[arg-type]
    dataset.stored = in_memory(detector, images, batch_size=16, num_workers=0, device=common.CPU)
    return detector, dataset


def sample_errors(detector: OwlDetector, dataset: TrainingSet, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """One row per sample size."""
    layer = detector.head.dense0
    head = {"weight": layer.weight.detach(), "bias": layer.bias.detach(), "sizes": sizes}
    found = []
    for item in (dataset[i] for i in range(len(dataset))):
        parts = {"tokens": item.tokens, "boxes": item.patch_boxes, "queries": item.queries, "objects": item.gt_boxes}
        found.append(background_error(**parts, **head))  # type: ignore[arg-type]
    rows = []
    for k in sizes:
        single = [(errors[k] / float(gradient.square().sum())) ** 0.5 for gradient, _, errors in found]
        groups = [found[i : i + BATCH] for i in range(0, max(1, len(found) - BATCH + 1), BATCH)]
        whole = [
            (sum(errors[k] for *_, errors in g) / float(sum(gradient for gradient, *_ in g).square().sum())) ** 0.5
            for g in groups
        ]
        kept = statistics.mean(min(certified + k, detector.num_patches) for _, certified, _ in found)
        row = {"patches": detector.num_patches, "k": k, "kept": kept, "bytes": kept / detector.num_patches}
        rows.append({**row, "item": statistics.median(single), "batch": statistics.median(whole)})
    return rows


def all_samples(root: Path, *, quick: bool) -> dict[str, list[dict[str, float]]]:
    """Errors of samples on both models; B/16 only in the full benchmark."""
    found = {"miniature": sample_errors(*miniature(root, 32 if quick else 200), (8, 16, 32))}
    if not quick:
        world = common.World(common.make_detector(384), n_images=28, n_coarse=1, batch_size=4)
        found["B/16, 384 px, random"] = sample_errors(world.detector, world.dataset(stored=True), (32, 64, 128))
    return found


def section(results: dict[str, dict[str, float]], samples: dict[str, list[dict[str, float]]]) -> str:
    """Of RESULTS.md."""
    names = ("write raw", "write", "cold raw", "cold", "first", "warm")
    lines = [
        "## The store's disk",
        "",
        "`python bench/store_io.py`; B/16's shape, GB/s of stored bytes, medians. Raw: the bare disk, same minute.",
        f"Cold: pages dropped before; first: with checksums. Gate {GATE}, goal {GOAL} (cold read of fp32 to raw).",
        "",
        "| dtype | " + " | ".join(names) + " | write share | read share | bytes read for one row |",
        "|" + "---|" * 10,
    ]
    for dtype, row in results.items():
        cells = [f"{row[name]:.2f}" for name in names]
        shares = [f"{100 * row['write_share']:.0f} %", f"{100 * row['read_share']:.0f} %", f"{row['one_row']:.2f}x"]
        lines.append("| " + " | ".join([dtype, *cells, *shares]) + " |")
    lines += [
        "",
        "Samples of background patches: expected relative error of the background term's gradient, closed form.",
        "",
        "| model | patches | k | kept | bytes | error, one item | error, batch of 32 |",
        "|" + "---|" * 7,
    ]
    for name, rows in samples.items():
        for r in rows:
            shares = [f"{100 * r[key]:.0f} %" for key in ("bytes", "item", "batch")]
            lines.append(f"| {name} | {r['patches']} | {r['k']} | {r['kept']:.0f} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def main() -> int:
    """Tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    common.start()
    console, results = Console(width=100), {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        for dtype in DTYPES:
            results[dtype] = measure(Path(place), dtype, **(QUICK if arguments.quick else FULL))
        samples = all_samples(Path(place), quick=arguments.quick)
    columns = ("write raw", "write", "write_share", "cold raw", "cold", "read_share", "first", "warm", "one_row")
    table = Table("dtype", *columns, title="OWL-ViT B/16, GB/s; shares of the bare disk", title_justify="left")
    for dtype, row in results.items():
        table.add_row(dtype, *(f"{row[name]:.2f}" for name in columns))
    console.print(table)
    sizes = Table("model", "P", "Dv", *(f"{d} MB" for d in DTYPES), *(f"{d} GB all" for d in DTYPES))
    projected = {}
    for name in ARCHITECTURES:
        specs = {dtype: spec_of(name, dtype) for dtype in DTYPES}
        amounts = {dtype: spec.bytes_per_image for dtype, spec in specs.items()}
        projected[name] = {dtype: amount * IMAGES for dtype, amount in amounts.items()}
        cells = [f"{a / 1e6:.2f}" for a in amounts.values()] + [f"{a * IMAGES / 1e9:.0f}" for a in amounts.values()]
        sizes.add_row(name, str(specs["fp32"].patches), str(specs["fp32"].width), *cells)
    console.print(sizes)
    columns_of_samples = ("patches", "k", "kept", "bytes", "item", "batch")
    drawn = Table("model", *columns_of_samples, title="samples of background patches", title_justify="left")
    for name, found in samples.items():
        for row in found:
            drawn.add_row(name, *(f"{row[key]:.3g}" for key in columns_of_samples))
    console.print(drawn)
    fp32 = results["fp32"]
    result = {
        "name": "store_io",
        "ratio": round(fp32["read_share"], 3),
        "gate": GATE,
        "goal": GOAL,
        "limit": 1.0,
        "equal": all(row["equal"] for row in results.values()) and fp32["one_row"] <= 2,
        "write_share": round(fp32["write_share"], 3),
        "gb_per_s": {d: {n: round(r[n], 3) for n in columns if "share" not in n} for d, r in results.items()},
        "bytes_15366": projected,
        "samples": samples,
    }
    if not arguments.quick:
        write_section("store_io", section(results, samples))
    if arguments.out:
        write_json(arguments.out, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
