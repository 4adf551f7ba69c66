"""Text of any script in pictures and plots: what a font has, what only the next one has, and what none has."""

import io

import matplotlib
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.figure import Figure
from PIL import Image

from noctowl import fonts
from noctowl.plots import Point, tradeoff

WATER, CAT, RARE = "水", "貓", "𠀀"


@pytest.fixture(scope="session")
def blocks(tmp_path_factory):
    """A font in which 水 is a full square of one em, a box stands for what it lacks, and 貓 has no outline."""
    path = tmp_path_factory.mktemp("fonts") / "Blocks-Regular.ttf"
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "water", "empty"])
    builder.setupCharacterMap({ord(WATER): "water", ord(CAT): "empty"})
    square, nothing = TTGlyphPen(None), TTGlyphPen(None)
    square.moveTo((0, 0))
    for point in ((0, 1000), (1000, 1000), (1000, 0)):
        square.lineTo(point)
    square.closePath()
    box = square.glyph()
    builder.setupGlyf({".notdef": box, "water": box, "empty": nothing.glyph()})
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "water", "empty"), (1000, 0)))
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Noctowl Blocks", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=1000)
    builder.setupPost()
    builder.save(path)
    return str(path)


@pytest.fixture
def only_dejavu(monkeypatch):
    monkeypatch.setattr(fonts, "installed", lambda: (fonts.DEJAVU,))


@pytest.fixture
def with_blocks(monkeypatch, blocks):
    monkeypatch.setattr(fonts, "installed", lambda: (fonts.DEJAVU, blocks))


def ink(text, size=20, width=400):
    """Which pixels of a line are drawn, [40, width]."""
    picture = Image.new("RGB", (width, 40), "white")
    fonts.write(picture, (0, 5), text, size=size, fill="black")
    return np.asarray(picture.convert("L")) < 128


@pytest.mark.parametrize("text", ["A red cup.", "Türchen “café” ✔", "Жар-птица", "Ελλάδα", "عربي", "e\u0301a\u200db"])
def test_covered_by_the_first_font(text, monkeypatch):
    """One piece, in DejaVu; the system is not searched."""
    monkeypatch.setattr(fonts, "installed", None)
    assert fonts.runs(text) == [(text, fonts.DEJAVU)]


def test_falls_back_by_character(with_blocks, blocks):
    assert fonts.runs(f"a {WATER}{WATER} b") == [("a ", fonts.DEJAVU), (WATER * 2, blocks), (" b", fonts.DEJAVU)]
    assert fonts.missing([f"a {WATER}", "b"]) == []
    assert fonts.drawable(f"a {WATER}") == f"a {WATER}"
    drawn = ink(WATER, size=20)
    assert drawn.sum() == 400  # the square of one em, and nothing else
    assert fonts.length(WATER * 3, 20) == 60


def test_no_font_has_it(only_dejavu):
    """The code point is drawn, letter by letter, and no box: pixels are those of the text [U+6C34]."""
    assert fonts.runs(f"a {WATER}!") == [("a [U+6C34]!", fonts.DEJAVU)]
    assert fonts.drawable(RARE) == "[U+20000]"
    assert (ink(WATER) == ink("[U+6C34]")).all()
    assert fonts.missing([f"x{WATER}{CAT}", f"{WATER} \n"]) == [WATER, CAT]


def test_characters_without_an_outline_are_not_had(with_blocks):
    assert fonts.runs(CAT) == [("[U+8C93]", fonts.DEJAVU)]
    assert fonts.missing([CAT]) == [CAT]


def test_accents_and_joiners_stay_with_their_letter(with_blocks, blocks):
    assert fonts.clusters("e\u0301x\u200dy") == ["e\u0301", "x\u200d", "y"]
    assert fonts.runs(f"{WATER}\ufe0f") == [(WATER, blocks)]  # a variation selector needs no glyph
    assert fonts.runs(f"{WATER}\u0301") == [(WATER, blocks), ("\u0301", fonts.DEJAVU)]
    assert fonts.missing(["\u200d\ufe0f \u2066"]) == []


def test_damaged_fonts_have_nothing(tmp_path):
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    assert fonts.coverage(str(broken)) == frozenset()
    assert fonts.coverage(str(tmp_path / "absent.ttf")) == frozenset()


def test_this_machines_fonts():
    files = fonts.installed()
    assert files[0] == fonts.DEJAVU
    plain = [fonts._styles(file) for file in files[1:]]
    assert plain == sorted(plain)
    assert ord("A") in fonts.coverage(fonts.DEJAVU)


def test_lines_are_as_wide_as_the_picture(with_blocks):
    """20 pixels a sign: five in 100; and words are kept whole where they fit."""
    assert fonts.wrap(WATER * 12, 100, 20) == [WATER * 5, WATER * 5, WATER * 2]
    assert fonts.wrap("", 100, 20) == [""]
    lines = fonts.wrap("a cup of tea with  a\nwooden spoon", 100, 15)
    assert " ".join(lines) == "a cup of tea with a wooden spoon"
    assert all(fonts.length(line, 15) <= 100 for line in lines)
    assert len(lines) > 2


def rendered(text, **options):
    figure = Figure(figsize=(2, 1), dpi=100)
    figure.text(0.1, 0.3, text, fontsize=24, **options)
    fonts.set_fonts(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(Image.open(file).convert("L")) < 128


@pytest.mark.filterwarnings("error")
def test_plots_fall_back_too(with_blocks):
    """24 points at 100 dots an inch are 33 pixels: a black square of that size. No warning of a glyph that lacks."""
    rows, columns = np.nonzero(rendered(WATER))
    assert abs(len(rows) - (24 / 72 * 100) ** 2) < 80
    assert np.ptp(rows) in (32, 33, 34)
    assert np.ptp(columns) in (32, 33, 34)


@pytest.mark.filterwarnings("error")
def test_plots_draw_code_points(only_dejavu, tmp_path):
    assert (rendered(fonts.drawable(WATER)) == rendered("[U+6C34]")).all()
    assert rendered("a$b$c").sum() > rendered("abc").sum()  # dollars are letters
    points = [Point(f"data.name={WATER}", [0.1], [0.2]), Point("$x_{", [0.2], [0.1])]
    with matplotlib.rc_context():
        assert tradeoff(points, tmp_path / "plot.png", x_label="x", y_label="y").is_file()
