import contextlib
import io
import json
import pickle
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import (
    AutoImageProcessor,
    CLIPImageProcessor,
    Owlv2ImageProcessor,
    Owlv2ImageProcessorPil,
    OwlViTImageProcessor,
    OwlViTImageProcessorPil,
)

from noctowl.data.fgovd import read_fgovd
from noctowl.data.images import ImageError, Preprocessor, load_image, load_rgb, resolve_image
from noctowl.errors import DataError, ModelError

PROCESSORS = (Owlv2ImageProcessor, OwlViTImageProcessor, Owlv2ImageProcessorPil, OwlViTImageProcessorPil)


def save(image, path, **options):
    image.save(path, **options)
    return path


def pixel(path):
    rgb = load_rgb(path)
    assert rgb.dtype == np.uint8
    assert rgb.shape[2] == 3
    return rgb[0, 0].tolist()


# --------------------------------------------------------------------------------------------------------- colour


@pytest.mark.parametrize(
    ("mode", "colour", "expected", "suffix"),
    [
        ("RGB", (10, 20, 30), [10, 20, 30], "png"),
        ("L", 77, [77, 77, 77], "png"),
        ("1", 1, [255, 255, 255], "png"),
        ("1", 0, [0, 0, 0], "png"),
        ("RGBA", (10, 20, 30, 255), [10, 20, 30], "png"),
        ("RGBA", (10, 20, 30, 0), [255, 255, 255], "png"),  # transparent lies on white
        ("RGBA", (0, 100, 200, 51), [204, 224, 244], "png"),  # 0.2 of the colour, 0.8 of white
        ("LA", (100, 0), [255, 255, 255], "png"),
        ("LA", (100, 255), [100, 100, 100], "png"),
        ("CMYK", (0, 255, 255, 0), [255, 0, 0], "tif"),
        ("CMYK", (255, 0, 0, 0), [0, 255, 255], "tif"),
        ("CMYK", (0, 0, 0, 255), [0, 0, 0], "tif"),
        ("I;16", 65535, [255, 255, 255], "png"),
        ("I;16", 256, [1, 1, 1], "png"),
        ("I;16", 128, [0, 0, 0], "png"),
        ("I;16", 32896, [128, 128, 128], "png"),  # 128 · 257
        ("I;16B", 32896, [128, 128, 128], "tif"),
        ("I", 32896, [128, 128, 128], "tif"),
        ("I", 255, [1, 1, 1], "tif"),  # the type of the samples decides, not their largest value
    ],
)
def test_every_mode_has_known_values(mode, colour, expected, suffix, tmp_path):
    image = Image.new(mode, (3, 2), colour)
    path = save(image, tmp_path / f"x.{suffix}")
    assert pixel(path) == expected
    assert load_rgb(path).shape == (2, 3, 3)


def test_sixteen_bits_are_scaled_and_rounded(tmp_path):
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    path = save(Image.fromarray(values), tmp_path / "x.png")
    expected = np.round(values.astype(np.float64) * 255 / 65535).astype(np.uint8)
    assert (load_rgb(path) == expected[..., None]).all()


def test_palette_with_and_without_transparency(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putpixel((1, 0), 1)
    assert load_rgb(save(image, tmp_path / "x.png")).tolist() == [[[200, 0, 0], [0, 0, 200]]]
    path = save(image, tmp_path / "y.png", transparency=1)
    assert load_rgb(path).tolist() == [[[200, 0, 0], [255, 255, 255]]]
    assert load_rgb(save(image, tmp_path / "z.gif")).tolist() == [[[200, 0, 0], [0, 0, 200]]]


def test_a_transparent_colour_of_rgb_and_grey_lies_on_white(tmp_path):
    rgb = Image.new("RGB", (2, 1), (1, 2, 3))
    rgb.putpixel((1, 0), (9, 9, 9))
    assert load_rgb(save(rgb, tmp_path / "x.png", transparency=(9, 9, 9))).tolist() == [[[1, 2, 3], [255, 255, 255]]]
    grey = Image.new("L", (2, 1), 5)
    grey.putpixel((1, 0), 9)
    assert load_rgb(save(grey, tmp_path / "y.png", transparency=9)).tolist() == [[[5, 5, 5], [255, 255, 255]]]


def test_cmyk_jpeg_and_first_frame(tmp_path):
    path = save(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), tmp_path / "x.jpg", quality=100)
    assert np.abs(np.array(pixel(path)) - [255, 0, 0]).max() <= 3
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert pixel(tmp_path / "x.gif") == [255, 0, 0]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 2), 0.5, np.float32), "mode 'F' has no defined RGB values"),
        (np.full((2, 2), 70000, np.int32), "grey values 70000..70000; allowed is 16 bit"),
        (np.full((2, 2), -1, np.int32), "grey values -1..-1"),
    ],
)
def test_modes_without_defined_values_are_refused(array, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_rgb(save(Image.fromarray(array), tmp_path / "x.tif"))


# ------------------------------------------------------------------------------------------------------------ EXIF


def oriented(path, orientation, size=(6, 4), kind="jpeg"):
    """Left half black, right half white, as stored."""
    image = Image.new("L", size)
    image.paste(255, (size[0] // 2, 0, *size))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, kind, exif=exif, **({"quality": 100} if kind == "jpeg" else {}))
    return path


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_the_annotations_size_decides_about_the_orientation(kind, tmp_path):
    path = oriented(tmp_path / "x", 6, kind=kind)  # shown turned by 90 degrees clockwise: 4 x 6
    stored = load_image(path, expected_size=(6, 4))
    assert (stored.pixels.shape, stored.turn) == ((4, 6, 3), "stored")
    assert stored.pixels[:, :2].max() < 20
    upright = load_image(path, expected_size=(4, 6))
    assert (upright.pixels.shape, upright.turn) == ((6, 4, 3), "upright")
    assert upright.pixels[:2].max() < 20  # the stored left side is on top
    assert upright.pixels[4:].min() > 235
    assert load_rgb(path).shape == (6, 4, 3)  # without annotations: as people see it
    with pytest.raises(DataError, match=r"size mismatch: the file has 6 x 4 \(4 x 6 upright\) .* say 5 x 5"):
        load_rgb(path, expected_size=(5, 5))


@pytest.mark.parametrize(("orientation", "size"), [(3, (6, 4)), (2, (6, 4)), (4, (6, 4)), (6, (6, 6)), (5, (6, 6))])
def test_where_both_fit_the_stored_pixels_are_taken(orientation, size, tmp_path):
    path = oriented(tmp_path / "x", orientation, size)
    image = load_image(path, expected_size=size)
    assert image.turn == "ambiguous"
    assert image.pixels[:, :2].max() < 20


@pytest.mark.parametrize("orientation", [0, 1, 9, 300])
def test_no_or_unknown_orientation(orientation, tmp_path):
    image = load_image(oriented(tmp_path / "x", orientation), expected_size=(6, 4))
    assert image.turn == "none"
    assert load_rgb(tmp_path / "x").shape == (4, 6, 3)


def test_every_orientation_without_expectation_is_pillows_transposition(tmp_path):
    for orientation in range(1, 9):
        path = oriented(tmp_path / "x", orientation)
        with Image.open(path) as image:
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert (load_rgb(path) == expected).all()


def test_tiff_orientation_is_applied_once(tmp_path):
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    path = save(image, tmp_path / "x.tif", tiffinfo={0x0112: 6}, compression="tiff_deflate")
    assert load_rgb(path)[..., 0].tolist() == np.rot90(np.asarray(image), -1).tolist()
    assert load_rgb(path, expected_size=(4, 6)).shape == (6, 4, 3)
    raw = save(image, tmp_path / "y.tif", tiffinfo={0x0112: 6})
    with pytest.raises(DataError, match="decoded to 6 x 4 pixels, its header says 4 x 6"):
        load_rgb(raw)


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.faults
def test_a_plain_size_mismatch_names_both_sizes(tmp_path):
    path = save(Image.new("RGB", (640, 480)), tmp_path / "x.png")
    with pytest.raises(DataError, match="size mismatch: the file has 640 x 480 pixels, the annotations say 480 x 640"):
        load_rgb(path, expected_size=(480, 640))


@pytest.mark.faults
@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "tif", "gif", "webp"])
def test_truncated_files_are_errors(suffix, tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = save(Image.fromarray(rgb), tmp_path / f"x.{suffix}")
    data = path.read_bytes()
    for keep in (len(data) // 2, 20, 3):
        path.write_bytes(data[:keep])
        with pytest.raises(DataError, match=r"x\.\w+: cannot be read as an image .*truncated"):
            load_rgb(path)


@pytest.mark.faults
@pytest.mark.parametrize(
    "content", [b"", b"<html>404</html>", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"P6 9 9 255\n"]
)
def test_files_that_are_no_images(content, tmp_path):
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(ImageError, match=rf"cannot be read as an image .*\({len(content)} bytes\)") as error:
        load_rgb(tmp_path / "x.jpg")
    assert error.value.kind == "corrupt"
    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), again.kind, str(again)) == (ImageError, "corrupt", str(error.value))


@pytest.mark.faults
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_give_pixels_or_a_data_error(data):
    buffer = io.BytesIO()
    Image.fromarray(np.arange(300, dtype=np.uint16).astype(np.uint8).reshape(10, 10, 3)).save(buffer, "png")
    content = bytearray(buffer.getvalue())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.png"
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            assert load_rgb(path).shape[2] == 3


@pytest.mark.faults
def test_missing_files_and_folders(tmp_path):
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(ImageError, match="the image file is missing") as error:
            load_rgb(path)
        assert error.value.kind == "missing"


@pytest.mark.faults
@pytest.mark.parametrize("side", [10_000, 20_000, 60_000])
def test_decompression_bombs_are_refused_before_decoding(side, tmp_path):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)
    with pytest.raises(DataError, match=r"at most 89478485 are read|DecompressionBomb"):
        load_rgb(tmp_path / "x.png")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["../x.jpg", "/etc/passwd", "a/../../x.jpg"])
def test_resolve_image_stays_below_its_root(name, tmp_path):
    with pytest.raises(DataError, match="leaves the images' folder"):
        resolve_image(tmp_path, name)
    assert resolve_image(tmp_path, "val2017/x.jpg") == tmp_path / "val2017/x.jpg"


# ------------------------------------------------------------------------------------------------------ preprocessor


def library(processor, rgb):
    image = torch.from_numpy(rgb).permute(2, 0, 1)
    return processor(images=image, input_data_format="channels_first", return_tensors="pt")["pixel_values"][0]


@pytest.mark.parametrize("processor_class", PROCESSORS)
@pytest.mark.parametrize("shape", [(3, 3), (3, 7), (7, 3), (1, 5), (97, 64), (64, 64), (301, 13), (96, 96), (480, 640)])
def test_equal_to_the_library_on_odd_sizes(processor_class, shape):
    processor = processor_class(size={"height": 96, "width": 96})
    rgb = np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)
    got = Preprocessor(processor)(rgb)
    assert (got.dtype, tuple(got.shape)) == (torch.float32, (3, 96, 96))
    assert (got - library(processor, rgb)).abs().max() <= 1e-6


@pytest.mark.golden
@pytest.mark.parametrize(("processor_class", "side"), [(Owlv2ImageProcessor, 960), (OwlViTImageProcessor, 768)])
def test_equal_to_the_library_on_real_images(processor_class, side, coco_mini):
    annotations = read_fgovd(coco_mini / "annotations/benchmarks/1_attributes.json")
    processor = processor_class(size={"height": side, "width": side})
    preprocessor = Preprocessor(processor)
    assert len(annotations.image_files) == 35
    for name, size in zip(annotations.image_files, annotations.image_sizes.tolist()):
        path = resolve_image(coco_mini / "images", name)
        rgb = load_rgb(path, expected_size=tuple(size))
        assert rgb.shape == (size[1], size[0], 3)
        with Image.open(path) as image:
            expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
        assert (preprocessor(rgb) - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("processor_class", PROCESSORS)
def test_pad_value_and_frame(processor_class):
    processor = processor_class(size={"height": 8, "width": 8})
    rgb = np.full((4, 8, 3), 255, np.uint8)
    mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
    for pad_value in (0.0, 0.5, 1.0):
        padded = Preprocessor(processor, frame="padded", pad_value=pad_value)(rgb)
        value = pad_value if "Owlv2" in processor_class.__name__ else round(255 * pad_value) / 255
        assert torch.allclose(padded[:, 0, 0], (1 - mean) / std, atol=1e-5)
        assert torch.allclose(padded[:, 7, 7], (value - mean) / std, atol=1e-5)
    warped = Preprocessor(processor, frame="warped")(rgb)
    assert torch.allclose(warped, ((1 - mean) / std)[:, None, None].expand(3, 8, 8), atol=1e-5)


def test_frame_and_size_come_from_the_processor():
    assert (Preprocessor(Owlv2ImageProcessor()).frame, Preprocessor(Owlv2ImageProcessor()).side) == ("padded", 960)
    assert (Preprocessor(OwlViTImageProcessor()).frame, Preprocessor(OwlViTImageProcessor()).side) == ("warped", 768)
    assert Preprocessor(Owlv2ImageProcessor(do_pad=False)).frame == "warped"


def test_settings_are_json_complete_and_stable(tmp_path):
    owlv2 = Preprocessor(Owlv2ImageProcessor(size={"height": 96, "width": 96}), pad_value=0.5)
    found = owlv2.settings()
    assert json.loads(json.dumps(found)) == found
    assert found["size"] == [96, 96]
    assert (found["frame"], found["pad_value"], found["backend"]) == ("padded", 0.5, "torchvision")
    assert (found["interpolation"], found["antialias"]) == ("bilinear", "gaussian")
    assert found["mean"] == [0.48145466, 0.4578275, 0.40821073]
    assert set(found["library"]) == {"transformers", "torchvision"}
    owlvit = Preprocessor(OwlViTImageProcessor()).settings()
    assert (owlvit["interpolation"], owlvit["antialias"], owlvit["frame"]) == ("bicubic", "filter", "warped")
    owlv2.image_processor.save_pretrained(tmp_path)
    assert Preprocessor(AutoImageProcessor.from_pretrained(tmp_path), pad_value=0.5).settings() == found
    assert pickle.loads(pickle.dumps(owlv2)).settings() == found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Preprocessor(CLIPImageProcessor()), "image processor CLIPImageProcessor; allowed are"),
        (lambda: Preprocessor(Owlv2ImageProcessor(size={"height": 8, "width": 9})), "a square size"),
        (lambda: Preprocessor(Owlv2ImageProcessor(do_normalize=False)), "all three steps"),
        (lambda: Preprocessor(OwlViTImageProcessor(do_center_crop=True)), "do_center_crop True"),
        (lambda: Preprocessor(Owlv2ImageProcessor(), pad_value=127), r"pad_value is 127; allowed is 0\.0 to 1\.0"),
    ],
)
def test_processors_that_would_break_the_box_frame_are_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make()


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((3, 4, 4), np.uint8)]
)
def test_pixels_of_another_kind_are_refused(array):
    with pytest.raises(DataError, match=r"needed is uint8 \[H, W, 3\]"):
        Preprocessor(Owlv2ImageProcessor())(array)


class Folder(torch.utils.data.Dataset):
    def __init__(self, paths, preprocessor):
        self.paths, self.preprocessor = paths, preprocessor

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.preprocessor(load_rgb(self.paths[index]))


def test_the_same_in_worker_processes(tmp_path):
    rng = np.random.default_rng(0)
    paths = [
        save(Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)), tmp_path / f"{i}.png")
        for i in range(6)
    ]
    data = Folder(paths, Preprocessor(Owlv2ImageProcessor(size={"height": 48, "width": 48})))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)
    assert torch.equal(torch.cat(list(loader)), torch.stack([data[i] for i in range(6)]))
