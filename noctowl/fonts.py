"""Text of any script in pictures and plots: of each character the first font at hand that draws it, or its code point.

DejaVu Sans comes with matplotlib and is always first; the system's fonts are looked at only for what it lacks. Where no
font draws a character its code point stands there, [U+6C34]: a box would look like a character of the caption.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from PIL import Image, ImageDraw, ImageFont

DEJAVU = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
STYLES = ("bold", "italic", "oblique", "black", "light", "thin", "condensed", "narrow", "mono", "serif")  # plain first
INVISIBLE = ("Cf", "Zl", "Zp")  # joiners, marks of direction: nothing to see, with or without a font


@cache
def installed() -> tuple[str, ...]:
    """Files: DejaVu Sans, then the system's, plain styles before bold, slanted, narrow ones."""
    found = sorted(font_manager.findSystemFonts(), key=lambda f: (_styles(f), Path(f).name, f))
    return (DEJAVU, *found)


def _styles(file: str) -> int:
    name = Path(file).name.lower().replace("sansserif", "")
    return sum(word in name for word in STYLES)


@cache
def coverage(file: str) -> frozenset[int]:
    """Code points of a font's character map; none for a file that is damaged or holds pictures of one size only."""
    try:
        font = FT2Font(file)
        return frozenset(font.get_charmap()) if font.scalable else frozenset()
    except (OSError, RuntimeError, ValueError):
        return frozenset()


@cache
def _has_ink(file: str, char: str) -> bool:
    """Some colour fonts list characters whose outline is empty."""
    return _font(file, 32).getmask(char).getbbox() is not None


@cache
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)


def draws(file: str, char: str) -> bool:
    """The font has the character, and something is to be seen of it."""
    return ord(char) in coverage(file) and (file == DEJAVU or char.isspace() or _has_ink(file, char))


def clusters(text: str) -> list[str]:
    """Characters with the accents, joiners and variation selectors that follow them: what must come from one font."""
    found: list[str] = []
    for char in text:
        joined = found and unicodedata.category(char) in ("Mn", "Mc", "Me", "Cf")
        if joined:
            found[-1] += char
        else:
            found.append(char)
    return found


def runs(text: str, fonts: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """(piece, font file), in order, to be drawn one after the other; code points stand for what no font draws.

    fonts: files in the order of preference; None: DejaVu Sans, then what is installed.
    """
    pieces = [piece for own in clusters(text) for piece in _cluster(own, fonts)]
    return [("".join(part for part, _ in group), file) for file, group in groupby(pieces, key=lambda piece: piece[1])]


def _cluster(own: str, fonts: Sequence[str] | None) -> list[tuple[str, str]]:
    visible = [c for c in own if not _ignorable(c)]
    first = DEJAVU if fonts is None else fonts[0]
    if all(draws(first, c) for c in visible):  # nearly always: the system need not be searched
        return [(own if len(visible) == len(own) else "".join(c for c in own if ord(c) in coverage(first)), first)]
    fonts = installed() if fonts is None else fonts
    whole = next((f for f in fonts if all(draws(f, c) for c in visible)), None)
    if whole is not None:
        return [("".join(c for c in own if ord(c) in coverage(whole)), whole)]
    single = [(c, next((f for f in fonts if draws(f, c)), None)) for c in visible]
    return [(c, f) if f is not None else (code_point(c), first) for c, f in single]


def _ignorable(char: str) -> bool:
    return unicodedata.category(char) in INVISIBLE or 0xFE00 <= ord(char) <= 0xFE0F  # variation selectors


def code_point(char: str) -> str:
    """What stands for a character that no font has."""
    return f"[U+{ord(char):04X}]"


def missing(texts: Iterable[str], fonts: Sequence[str] | None = None) -> list[str]:
    """Characters of the texts that no font draws, each once, in the order in which they occur."""
    fonts = installed() if fonts is None else fonts
    visible = dict.fromkeys(c for text in texts for c in text if not _ignorable(c) and not c.isspace())
    return [c for c in visible if not any(draws(f, c) for f in fonts)]


# Pictures


def length(text: str, size: int, fonts: Sequence[str] | None = None) -> float:
    """Pixels that a line is wide."""
    return sum(_font(file, size).getlength(piece) for piece, file in runs(text, fonts))


def wrap(text: str, width: float, size: int, fonts: Sequence[str] | None = None) -> list[str]:
    """Lines of at most `width` pixels, broken at spaces; wider words, as in scripts without spaces, anywhere."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if length(longer, size, fonts) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for own in clusters(word):
            if lines[-1] and length(lines[-1] + own, size, fonts) > width:
                lines.append("")
            lines[-1] += own
    return lines


def write(
    picture: Image.Image,
    xy: tuple[float, float],
    text: str,
    *,
    size: int,
    fill: str,
    fonts: Sequence[str] | None = None,
) -> None:
    """One line with its upper left corner at `xy`; all fonts stand on one base line."""
    draw = ImageDraw.Draw(picture)
    x, y = xy[0], xy[1] + _font(DEJAVU, size).getmetrics()[0]
    for piece, file in runs(text, fonts):
        font = _font(file, size)
        draw.text((x, y), piece, fill=fill, font=font, anchor="ls")
        x += font.getlength(piece)


# Plots


def drawable(text: str, fonts: Sequence[str] | None = None) -> str:
    """The text with code points for what no font draws."""
    return "".join(piece for piece, _ in runs(text, fonts))


def set_fonts(figure: Figure) -> None:
    """Gives every text of a plot the fonts that it needs, by matplotlib's own fallback; "$" is a dollar, no formula."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        files = list(dict.fromkeys(file for _, file in runs(text.get_text())))
        if files and files != [DEJAVU]:
            text.set_fontfamily([_family(file) for file in dict.fromkeys([DEJAVU, *files])])


@cache
def _family(file: str) -> str:
    """The name under which matplotlib finds the file, which it may not have seen yet."""
    font_manager.fontManager.addfont(file)
    return FT2Font(file).family_name
